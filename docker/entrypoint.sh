#!/bin/sh
# Name every secret to the command: /run/secrets/batchmill_broker_url becomes BATCHMILL_BROKER_URL_FILE, and so on for
# any key of docs/settings.md; flower_… likewise. Then become the command.
set -eu

for file in "${BATCHMILL_SECRETS_DIR:-/run/secrets}"/batchmill_* "${BATCHMILL_SECRETS_DIR:-/run/secrets}"/flower_*; do
  [ -e "$file" ] || continue
  if [ ! -r "$file" ]; then
    echo "error: secret $file cannot be read by uid $(id -u); docker/make-secrets.sh makes readable ones" >&2
    exit 2
  fi
  name=$(basename "$file" | tr '[:lower:]' '[:upper:]')
  export "${name}_FILE=$file"
done

# What a role writes holds prompts and answers.
umask 077
exec "$@"
