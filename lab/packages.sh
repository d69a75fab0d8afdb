#!/bin/sh
# Install the Debian packages that are missing; with none missing, apt is not even asked.
set -eu
missing=
for name in "$@"; do
    status=$(dpkg-query -W -f '${db:Status-Status}' "$name" 2>/dev/null || true)
    [ "$status" = installed ] || missing="$missing $name"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ]; then
    echo "lab: missing Debian packages:$missing. Run as root: apt-get install$missing" >&2
    exit 1
fi
echo "  … installing$missing"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# The lists may be old or absent: ask for new ones only if the first try fails.
# shellcheck disable=SC2086
if ! apt-get install -y --no-install-recommends $missing >"$log" 2>&1; then
    if ! { apt-get update && apt-get install -y --no-install-recommends $missing; } >"$log" 2>&1; then
        tail -n 5 "$log" >&2
        echo "lab: apt-get could not install:$missing (its last words are above)" >&2
        exit 1
    fi
fi
echo "  ✓ installed$missing"
