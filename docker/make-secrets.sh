#!/bin/sh
# Make the secrets of docker-compose.gpu.yml, once, in docker/secrets/ (or the folder named). What is there is kept.
#
# The folder is for its owner alone; the files in it are readable, since containers run as another user and a file
# secret keeps the mode it has here.
set -eu

folder=${1:-"$(dirname "$0")/secrets"}
umask 077
mkdir -p "$folder"
chmod 700 "$folder"

random() { od -An -N32 -tx1 /dev/urandom | tr -d ' \n'; }

put() {
  [ -e "$folder/$1" ] || printf '%s\n' "$2" >"$folder/$1.new"
  if [ -e "$folder/$1.new" ]; then
    chmod 644 "$folder/$1.new"
    mv "$folder/$1.new" "$folder/$1"
  fi
}

# The passwords belong to several files each, so they are kept for a second run.
put rabbitmq_password "$(random)"
put redis_password "$(random)"
rabbitmq=$(cat "$folder/rabbitmq_password")
redis=$(cat "$folder/redis_password")

put security_dispatch_key "$(random)"
put security_results_key "$(random)"
put broker_url "amqp://batchmill:$rabbitmq@rabbitmq:5672//"
put state_url "redis://:$redis@redis-state:6379/0"
put cache_url "redis://:$redis@redis-cache:6379/0"
put rabbitmq.conf "default_user = batchmill
default_pass = $rabbitmq"
put redis.conf "requirepass $redis"
put flower_broker_api "http://batchmill:$rabbitmq@rabbitmq:15672/api/"
put flower_basic_auth "batchmill:$(random)"

echo "secrets are in $folder; the login of Flower is in $folder/flower_basic_auth"
