#!/usr/bin/env bash
# Four hosts that are one machine: one of them is lost, and the job goes on with another one in its place.
#
#   examples/hosts.sh [FOLDER]
#
# A host is a name, CKPT_HOST: its processes find each other by sockets in a folder of that name. All is written to
# FOLDER, by default a new one, and all processes are ended, after Ctrl-C too.
set -euo pipefail

script=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/one_host.py
python=$(command -v "${PYTHON:-python}") || { echo "there is no ${PYTHON:-python}; set PYTHON" >&2; exit 2; }
case $#${1:-} in
    *-h | *--help) exec sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" ;;
    [01] | 1[!-]*) ;;
    *) echo "hosts.sh takes one folder, not $*" >&2; exit 2 ;;
esac
folder=${1:-$(mktemp -d)}
mkdir -p "$folder/logs"
cd "$folder"
[ ! -e shared ] || { echo "$PWD has a run already; name a new folder" >&2; exit 2; }
runtime=$PWD/sockets

# The processes of a host, or of all: trainers, and the writer processes that keep their snapshots.
processes() {
    local found
    found=$(grep -lzxF "CKPT_RUNTIME_DIR=$runtime" /proc/[0-9]*/environ 2>/dev/null || true)
    # shellcheck disable=SC2086 # names without spaces
    [ -z "${1:-}" ] || found=$(grep -lzxF "CKPT_HOST=$1" $found 2>/dev/null || true)
    cut -d / -f 3 <<<"$found"
}

# End them; bash would say of each that it was killed.
end() {
    local pid
    for pid in "$@"; do kill -9 "$pid" && wait "$pid"; done 2>/dev/null || true
}

end_all() {
    # shellcheck disable=SC2046 # numbers
    end $(jobs -p) $(processes)
}
trap end_all EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Start the job on the hosts that are named, for so many steps.
starts=0
train() {
    local steps=$1 rank=0 host port
    shift && starts=$((starts + 1))
    port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    for host in "$@"; do
        CKPT_HOST=$host CKPT_RUNTIME_DIR=$runtime RANK=$rank WORLD_SIZE=$# MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
            OMP_NUM_THREADS=1 "$python" "$script" "$steps" >"logs/$starts-$host" 2>&1 &
        rank=$((rank + 1))
    done
}

# Wait until a command succeeds, at most four minutes.
until_true() {
    local until=$((SECONDS + 240))
    until "$@"; do
        if [ $SECONDS -ge $until ] || { [ "$1" != ended ] && ended; }; then
            echo "not $1 in time; $PWD/logs ends with" >&2
            tail -n 5 "logs/$starts-"* >&2
            exit 1
        fi
        sleep 0.2
    done
}

arrived() { [ "$(grep -c 'is at its peers$' logs/1-node0)" -ge 12 ] 2>/dev/null; }
ended() { [ -z "$(jobs -pr)" ]; }
told() { grep -h '^restored step\|^node[0-9]: .* from \|^node[0-9]: trained' "logs/$starts-"*; }

echo "1. node0, node1, node2 and node3 train. Each has a disk, and copies of its snapshots on another one:"
train 100000 node0 node1 node2 node3
until_true arrived
grep 'is at its peers$' logs/1-node0 | tail -n 1
CKPT_HOST=node3 CKPT_RUNTIME_DIR=$runtime "$python" -m ckpt_component.cli memory ls

echo "2. node1 is lost, with its memory and its disk. The trainers of the others fail."
# shellcheck disable=SC2046 # numbers
end $(processes node1)
rm -r "$runtime/node1" disks/node1
until_true ended

echo "3. The job starts again, with node4 in its place, from memory:"
train 10 node0 node4 node2 node3
until_true ended
told

echo "4. All hosts restart: what was in memory is gone. The job goes on from their disks:"
end $(processes)
rm -rf "$runtime"
train 3 node0 node4 node2 node3
until_true ended
told
echo "The disk of node0 has a part of each checkpoint, checkpoint.dir all of it:"
"$python" -m ckpt_component.cli ls disks/node0/run
"$python" -m ckpt_component.cli ls shared/run
echo "logs and checkpoints are in $PWD"
