#!/usr/bin/env bash
# Runs one command on N emulated hosts, each behind a link of the bandwidth you name, all on one Linux machine.
#
#   benchmarks/hosts.sh [-n HOSTS] [-r RATE] [-d DELAY] [-t SECONDS] [-l FOLDER] -- python train.py ...
#   benchmarks/hosts.sh --check        says what is missing on this machine, if anything is
#
#   -n HOSTS    number of hosts, 2 or more (default 2)
#   -r RATE     what each host can send: Nmbit or Ngbit with a whole N, or none for no limit (default 1gbit)
#   -d DELAY    added to every packet, such as 1ms (default: none; needs the kernel's netem)
#   -t SECONDS  after which the command is ended on all hosts (default 600)
#   -l FOLDER   where to keep the output of the hosts; without it, it is shown after a failure and removed
#
# A host is a network namespace; a bridge joins them, and a token bucket (tc tbf) shapes what each one sends. The
# command runs once per host and finds torch.distributed's variables: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
# NODE_RANK, GROUP_RANK, MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME. Standard output of rank 0 is passed on. The last
# line is a JSON object with the bytes that left each host, as the kernel counted them.
#
# Exit status: that of the first rank that failed (then the others are ended too); 124 after -t; 2 for a wrong argument;
# 3 if the machine cannot do it.
set -uo pipefail

hosts=2 rate=1gbit delay='' limit=600 folder=''
id=lc$$ pids=()

main() {
  if [[ ${1:-} == --check ]]; then check && exit 0; fi
  parse "$@"
  check
  trap cleanup EXIT
  # Ctrl-C reaches us and the program that started us, which then ends us too: once is enough
  trap 'trap "" INT TERM HUP; exit 130' INT TERM HUP
  build
  start "${command[@]}"
  finish
}

fail() { # STATUS MESSAGE
  echo "hosts.sh: $2" >&2
  exit "$1"
}

parse() {
  local option
  while getopts :n:r:d:t:l: option; do
    case $option in
      n) hosts=$OPTARG ;;
      r) rate=$OPTARG ;;
      d) delay=$OPTARG ;;
      t) limit=$OPTARG ;;
      l) folder=$OPTARG ;;
      *) usage ;;
    esac
  done
  shift $((OPTIND - 1))
  command=("$@")
  [[ ${#command[@]} -gt 0 ]] || usage
  [[ $hosts =~ ^[0-9]+$ && $hosts -ge 2 && $hosts -le 200 ]] || fail 2 "-n is a number of hosts, 2 to 200, not '$hosts'"
  [[ $limit =~ ^[1-9][0-9]*$ ]] || fail 2 "-t is a number of seconds, not '$limit'"
  [[ $rate =~ ^([1-9][0-9]*[mg]bit|none)$ ]] || fail 2 "-r is Nmbit, Ngbit (whole numbers) or none, not '$rate'"
}

usage() {
  sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
  exit 2
}

# Everything that build() needs is tried once on a small scale, so that what is missing is named before anything starts.
check() {
  [[ $(uname) == Linux ]] || fail 3 "network namespaces exist on Linux only"
  if ! command -v ip >/dev/null || ! command -v tc >/dev/null; then
    fail 3 "the commands ip and tc are missing; install the package iproute2 (Debian: apt-get install iproute2)"
  fi
  [[ $EUID -eq 0 ]] || fail 3 "making network namespaces needs root: run it with sudo"
  local probe=$id-check error
  error=$({ ip netns add "$probe" && ip netns exec "$probe" true; } 2>&1) ||
    fail 3 "this system does not allow network namespaces (a container without CAP_SYS_ADMIN?): $error"
  error=$({
    ip -n "$probe" link add br0 type bridge &&
      ip -n "$probe" link add e0 type veth peer name p0 &&
      ip netns exec "$probe" tc qdisc add dev e0 root handle 1: tbf rate 1gbit burst 128k latency 50ms
  } 2>&1)
  local status=$?
  if [[ $status -eq 0 && -n $delay ]]; then
    error=$(ip netns exec "$probe" tc qdisc add dev e0 parent 1: netem delay "$delay" 2>&1)
    status=$?
  fi
  ip netns del "$probe"
  [[ $status -eq 0 ]] || fail 3 "this kernel lacks bridge, veth, tbf or (for -d) netem: $error"
}

# shellcheck disable=SC2317  # called by the trap
cleanup() {
  local host
  [[ ${#pids[@]} -eq 0 ]] || { kill "${pids[@]}" && wait; } 2>/dev/null
  for ((host = 0; host < hosts; host++)); do ip netns del "$id-$host"; done 2>/dev/null
  ip netns del "$id-bridge" 2>/dev/null
  [[ -n $folder ]] || rm -rf "$logs"
}

build() {
  logs=${folder:-$(mktemp -d)}
  mkdir -p "$logs" || exit 2
  local host
  {
    ip netns add "$id-bridge" && ip -n "$id-bridge" link add br0 type bridge && ip -n "$id-bridge" link set br0 up
  } || fail 3 "the bridge could not be set up"
  for ((host = 0; host < hosts; host++)); do
    { add_host "$host" && shape "$host"; } || fail 3 "host $host could not be set up"
  done
}

add_host() {
  local space=$id-$1
  ip netns add "$space" || return
  # neighbour discovery would add bytes of its own to the counters; a kernel without IPv6 has nothing to turn off
  ip netns exec "$space" sh -c 'echo 1 >/proc/sys/net/ipv6/conf/default/disable_ipv6' 2>/dev/null
  ip link add "e$1" netns "$space" type veth peer name "p$1" netns "$id-bridge" &&
    ip -n "$id-bridge" link set "p$1" master br0 up &&
    ip -n "$space" addr add "10.77.0.$(($1 + 1))/24" dev "e$1" &&
    ip -n "$space" link set lo up &&
    ip -n "$space" link set "e$1" up
}

shape() {
  local qdisc=(ip netns exec "$id-$1" tc qdisc add dev "e$1") burst parent=root
  if [[ $rate != none ]]; then
    # The bucket holds one millisecond of traffic, and at least one 64 KiB packet of segmentation offload with the
    # headers of its segments: such packets pass whole, as they do to a network card. A larger bucket would let small
    # messages pass at the speed of memory.
    case $rate in
      *gbit) burst=$((${rate%gbit} * 125000)) ;;
      *) burst=$((${rate%mbit} * 125)) ;;
    esac
    ((burst >= 72000)) || burst=72000
    "${qdisc[@]}" root handle 1: tbf rate "$rate" burst "$burst" latency 50ms || return
    parent='parent 1:'
  fi
  # shellcheck disable=SC2086  # two words
  [[ -z $delay ]] || "${qdisc[@]}" $parent handle 10: netem delay "$delay" limit 100000
}

start() {
  local host
  before=()
  for ((host = 0; host < hosts; host++)); do before+=("$(sent "$host")"); done
  exec 3>&1 # a copy of our own standard output: opening /dev/stdout again would truncate a file
  for ((host = hosts - 1; host >= 0; host--)); do
    if ((host == 0)); then exec 4>&3; else exec 4>"$logs/rank$host.out"; fi
    # each host has its own ports, so a fixed one is free
    RANK=$host WORLD_SIZE=$hosts LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 NODE_RANK=$host GROUP_RANK=$host \
      MASTER_ADDR=10.77.0.1 MASTER_PORT=29500 GLOO_SOCKET_IFNAME=e$host OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} \
      timeout --kill-after=5 "$limit" ip netns exec "$id-$host" "$@" >&4 2>"$logs/rank$host.err" &
    pids+=($!)
  done
  exec 3>&- 4>&-
}

sent() { ip netns exec "$id-$1" cat "/sys/class/net/e$1/statistics/tx_bytes"; }

finish() {
  local code=0 status left host
  for ((left = hosts; left > 0; left--)); do
    wait -n
    status=$?
    if ((status != 0 && code == 0)); then
      code=$status
      sleep 2 # the others may still say what they saw
      kill "${pids[@]}" 2>/dev/null
    fi
  done
  pids=()
  if ((code != 0)); then
    for ((host = 0; host < hosts; host++)); do
      printf -- '--- rank %d\n' "$host"
      tail -n 20 "$logs/rank$host.err"
    done >&2
  fi
  local bytes=()
  for ((host = 0; host < hosts; host++)); do bytes+=($(($(sent "$host") - before[host]))); done
  local IFS=,
  printf '{"hosts": %d, "rate": "%s", "exit": %d, "bytes_sent": [%s]}\n' "$hosts" "$rate" "$code" "${bytes[*]}"
  exit "$code"
}

main "$@"
