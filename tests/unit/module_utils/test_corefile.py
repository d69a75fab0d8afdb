"""The block in a Corefile, and the zones that others serve. CoreDNS reads it in tests/k8s."""

from __future__ import annotations

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils import corefile

KUBEADM = """\
.:53 {
    errors
    health {
       lameduck 5s
    }
    ready
    kubernetes cluster.local in-addr.arpa ip6.arpa {
       pods insecure
       fallthrough in-addr.arpa ip6.arpa
       ttl 30
    }
    prometheus :9153
    forward . /etc/resolv.conf {
       max_concurrent 1000
    }
    cache 30 {
       disable success cluster.local
       disable denial cluster.local
    }
    loop
    reload
    loadbalance
}
"""
EDITED = f"""\
# the company's zones
(snip) {{
    errors   # of everything
}}
corp.example:53, dns://other.example {{
    import snip
    forward . 192.0.2.53
}}
{KUBEADM}10.0.0.0/8 {{
    hosts "/etc/a file with }} {{"
}}"""
K3S = f"{KUBEADM}import /etc/coredns/custom/*.server\n"


def ours(name: str = "mesh.example.org", port: str = "53") -> str:
    return corefile.block(name, corefile.RANGES, ["100.100.100.100"], port)


@pytest.mark.parametrize("text", [KUBEADM, EDITED, K3S, "", KUBEADM.rstrip("\n")])
def test_a_file_is_the_same_after_the_block_was_added_and_removed(text):
    made = corefile.with_block(text, ours())
    assert made.startswith(text) and made.endswith(ours())
    # A newline at the end of the last line is all that may stay.
    assert corefile.without_block(made).rstrip("\n") == text.rstrip("\n")
    assert corefile.with_block(made, ours()) == made


def test_a_comment_that_mentions_the_marker_is_not_the_block():
    text = KUBEADM.replace("    loop\n", "    loop # see '# BEGIN headcni' below\n")
    made = corefile.with_block(text, ours())
    assert made == text + ours()
    assert corefile.with_block(made, ours("other.example")) == text + ours("other.example")


UNUSUAL = """\
(common) {
    kubernetes cluster.local in-addr.arpa { pods insecure }
}
(all) {
    import common
    reload
}
a.example,
b.example:5353
{
    import all
    forward . 192.0.2.53 { max_concurrent 1000 }
    hosts "/etc/a file
with two lines # and no comment" {
        192.0.2.1 one # a comment }
    }
    template IN A { answer "{{ .Name }} 60 IN A 192.0.2.9" }
}
.:53 { # everything else
    errors
}
tls://a.example {
    errors
}
"""


def test_unusual_forms_are_read_as_coredns_reads_them():
    first, second, third = corefile.blocks(UNUSUAL)
    assert first.zones == (("a.example", "53"), ("b.example", "5353"))
    names = [words[0] for words in first.directives]
    assert names == [
        *("import", "import", "kubernetes", "reload"),
        *("forward", "hosts", "template"),
    ]
    assert (second.keys, second.directives) == ((".:53",), (("errors",),))
    assert third.zones == (("a.example", "853"),)
    assert corefile.reloads(UNUSUAL) and corefile.port_of_all([first, second]) == "53"
    found = corefile.conflicts("local", (), "53", [first])
    assert "cluster.local is part of the tailnet's domain" in found[0]
    assert corefile.conflicts("a.example", (), "53", [third]) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (".:53\nerrors\nforward . 192.0.2.53 {\n}\n", "without braces"),
        ('.:53 {\n hosts "/etc/a {\n}\n', "quotation mark"),
        (".:53 {\n errors }\n", "after other words"),
        ("(a) {\n import a\n}\n.:53 {\n import a\n}\n", "without end"),
        ("{\n errors\n}\n", "without a name"),
        (".:53 {\n errors\n", "not closed"),
        ("a.example,\n", "not closed"),
    ],
)
def test_what_would_be_read_otherwise_is_refused(text, said):
    with pytest.raises(ValueError, match=said):
        corefile.blocks(text)


def test_what_somebody_writes_around_the_block_stays():
    made = corefile.with_block(KUBEADM, ours()).replace("ttl 30", "ttl 5")
    made += "b.example {\n    whoami\n}\n"
    again = corefile.with_block(made, ours("new.example.org"))
    assert again == made.replace("mesh.example.org", "new.example.org")
    assert "ttl 5" in corefile.without_block(again) and "b.example" in corefile.without_block(again)


def test_a_block_with_one_marker_is_refused():
    with pytest.raises(ValueError, match="must be there once each"):
        corefile.without_block(KUBEADM + ours().replace(corefile.END, ""))
    with pytest.raises(ValueError, match="by hand"):
        corefile.without_block(ours() + ours())


def test_zones_are_read_with_their_ports_from_every_form_of_a_key():
    found = corefile.blocks(EDITED)
    assert [block.zones for block in found] == [
        (("corp.example", "53"), ("other.example", "53")),
        (("", "53"),),
        (("10.in-addr.arpa", "53"),),
    ]
    (one,) = corefile.blocks(ours(port="1053"))
    assert len(one.zones) == 1 + 64 + 1
    assert one.zones[0] == ("mesh.example.org", "1053")
    assert one.zones[1] == ("64.100.in-addr.arpa", "1053")
    assert one.zones[64] == ("127.100.in-addr.arpa", "1053")
    assert one.zones[65] == ("0.e.1.a.c.5.1.1.a.7.d.f.ip6.arpa", "1053")


def test_the_port_is_that_of_all_other_names():
    assert corefile.port_of_all(corefile.blocks(KUBEADM)) == "53"
    assert corefile.port_of_all(corefile.blocks(KUBEADM.replace(".:53", "dns://.:5353"))) == "5353"


def test_reload_and_imports_are_found_only_where_they_mean_something():
    assert corefile.reloads(KUBEADM)
    assert not corefile.reloads(KUBEADM.replace("    reload\n", "    # reload\n"))
    assert corefile.imports(K3S) == ["/etc/coredns/custom/*.server"]
    assert corefile.imports(KUBEADM.replace("loop", "import /etc/coredns/custom/*.override")) == []


@pytest.mark.parametrize(
    "other",
    ["mesh.example.org {", "MESH.example.org.:53 {", "a.example mesh.example.org:53 {"],
)
def test_a_zone_that_is_served_already_is_a_conflict(other):
    found = corefile.blocks(f"{KUBEADM}{other}\n    whoami\n}}\n")
    said = corefile.conflicts("mesh.example.org", corefile.RANGES, "53", found)
    assert said == ["another server block already serves mesh.example.org:53"]
    assert corefile.conflicts("mesh.example.org", corefile.RANGES, "1053", found) == []


def test_a_reverse_zone_that_is_served_already_is_a_conflict():
    found = corefile.blocks("100.100.0.0/16 {\n    whoami\n}\n")
    (said,) = corefile.conflicts("mesh.example.org", corefile.RANGES, "53", found)
    assert "100.100.in-addr.arpa:53" in said


@pytest.mark.parametrize("domain", ["cluster.local", "local"])
def test_a_domain_that_contains_the_clusters_is_a_conflict(domain):
    (said,) = corefile.conflicts(domain, corefile.RANGES, "53", corefile.blocks(KUBEADM))
    assert "cluster.local" in said and "no longer be found" in said


@pytest.mark.parametrize("domain", ["mesh.cluster.local", "example.org", "ocal"])
def test_other_domains_are_none(domain):
    assert not corefile.conflicts(domain, corefile.RANGES, "53", corefile.blocks(KUBEADM))


@pytest.mark.parametrize("text", [".:53 {\n    errors\n", ". {\n} }\n", ". {\n  a {\n  }\n"])
def test_a_file_with_braces_that_do_not_match_is_refused(text):
    with pytest.raises(ValueError):
        corefile.blocks(text)


@pytest.mark.parametrize("text", ["", ".", "a b", "a..b", "x{y", "a" * 64, "mesh.example.org:53"])
def test_a_domain_that_is_none_is_refused_before_it_gets_into_the_file(text):
    with pytest.raises(ValueError, match="expected a domain such as"):
        corefile.domain(text)


def test_a_domain_has_one_form():
    assert corefile.domain("Mesh.Example.ORG.") == "mesh.example.org"
