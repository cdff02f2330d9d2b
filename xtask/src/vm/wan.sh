# Throughput and dials over a path of 100 ms and 50 Mbit/s, with and without loss (an emulated machine cannot do much more): a direct connection, tunnels on lanes, and tunnels on the
# link, one after the other. Server and client are in one network namespace, agent and targets in another, and the path is a
# cable between them. Lines with `=` are the results: loss, way, what, value.
set -e
work=/tmp/wan
mkdir -p $work
adit-load certs $work --name 10.9.0.1
for side in near far; do ip netns add $side; ip -n $side link set lo up; done
ip link add near netns near type veth peer name far netns far
ip -n near address add 10.9.0.1/24 dev near
ip -n far address add 10.9.0.2/24 dev far
ip -n near link set near up
ip -n far link set far up
end() { kill -9 $(jobs -p) 2>/dev/null || true; }
trap end EXIT

mkfifo $work/hold
ip netns exec far adit-load target --host 10.9.0.2 < $work/hold > $work/targets &
exec 9> $work/hold
until [ -s $work/targets ]; do sleep 0.1; done
targets=$(cat $work/targets)
control=$(echo "$targets" | sed 's/.*"control":"\([^"]*\)".*/\1/')

stack() {
  lanes=$1
  rm -f $work/front.sock
  ip netns exec near adit server --log-level=warn --frontend=http-connect=unix:$work/front.sock --agent-port=8091 \
    --cluster-ca-cert=$work/ca.pem --cluster-cert=$work/server.pem --cluster-key=$work/server.key --admin-port=off \
    --lanes-per-link="$lanes" &
  server=$!
  ip netns exec far adit agent --log-level=warn --proxy-server-host=10.9.0.1 --agent-id=far --ca-cert=$work/ca.pem \
    --agent-cert=$work/agent.pem --agent-key=$work/agent.key --lanes="$lanes" --admin-server-port=off &
  agent=$!
  until ip netns exec near wget -q -O /dev/null http://127.0.0.1:8092/readyz; do sleep 0.2; done
}

measure() {
  way=$1
  for plan in '"measurements":["bulk"],"streams":[1],"seconds":6' '"measurements":["dials"],"dialers":[1],"seconds":4'; do
    shown=$(ip netns exec near timeout 90 adit-load run --way "$2" $3 --targets "$targets" --control "$control" --plan "{$plan}")
    echo "= $loss $way $shown"
  done
}

for loss in 0 1; do
  for side in near far; do
    ip netns exec $side tc qdisc replace dev $side root netem delay 50ms rate 50mbit loss $loss% limit 100000
  done
  measure direct tcp
  for lanes in 64 0; do
    stack $lanes
    measure lanes-$lanes http-connect "--frontend $work/front.sock"
    kill $agent $server
    wait $agent $server || true
  done
done
