#!/bin/bash
# Install what pip cannot, by apt where that is allowed; else say what is missing. `tests` or `venv`.
set -euo pipefail

case "${1:-}" in
  tests) needs=(redis-server:redis-server rabbitmq-server:/usr/lib/rabbitmq/bin/rabbitmq-server
                chromium:chromium chromium-driver:chromedriver tmux:tmux) ;;
  venv) needs=(python3-venv:none) ;;
  *) echo "usage: $0 tests|venv" >&2; exit 2 ;;
esac

missing=()
for need in "${needs[@]}"; do
  command -v "${need#*:}" >/dev/null || missing+=("${need%%:*}")
done
[ "${#missing[@]}" -eq 0 ] && exit 0

if command -v apt-get >/dev/null; then
  if [ "$(id -u)" -eq 0 ]; then root=(); elif sudo -n true 2>/dev/null; then root=(sudo -n); else root=(none); fi
  if [ "${root[0]:-}" != none ]; then
    echo "installing by apt: ${missing[*]}"
    # RUNLEVEL=1: Debian starts no service it installs; the tests start their own, on ports of their own.
    "${root[@]}" apt-get update -qq
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
      apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null
    exit 0
  fi
fi

echo "missing: ${missing[*]}; on Debian: apt-get install ${missing[*]}" >&2
# Tests that need what is missing are skipped on a laptop, and fail where CI=true.
[ "$1" = tests ]
