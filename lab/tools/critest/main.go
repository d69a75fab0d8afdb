// critest's specs as a program. Upstream keeps them in a test, which `go build` does not make.
package main

import (
	"flag"
	"os"

	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/gomega"
	"sigs.k8s.io/cri-tools/pkg/framework"
	_ "sigs.k8s.io/cri-tools/pkg/validate"
)

// RunSpecs tells by what it returns; it wants somebody to tell nevertheless.
type nobody struct{}

func (nobody) Fail() {}

func main() {
	framework.RegisterFlags()
	flag.Parse()
	gomega.RegisterFailHandler(ginkgo.Fail)
	if !ginkgo.RunSpecs(nobody{}, "critest") {
		os.Exit(1)
	}
}
