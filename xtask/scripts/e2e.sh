#!/usr/bin/env bash
# e2e.sh FOLDER: builds what the end-to-end tests need: a control plane, Prometheus, the chart's renderings, and definitions of
# others' kinds.
# Go knows itself what is to be built anew, keeps the modules, and knows their sums.
. "$(dirname "$0")/common.sh"
need_go
folder=$1
mkdir -p "$folder"
bash xtask/scripts/chart.sh render "$folder"
echo "e2e: building etcd, kube-apiserver, kubectl, kube-proxy, kubemark and a node"
cd tunnel-daemon/tests/e2e/go
version=$("$go" list -m -f '{{.Version}}' k8s.io/kubernetes)
# As in Kubernetes' own builds: Helm asks the API server for its version.
"$go" build -trimpath -ldflags="-s -w -X k8s.io/component-base/version.gitVersion=$version" -o "$folder" \
  ./cmd/etcd ./cmd/execs ./cmd/node k8s.io/kubernetes/cmd/kube-apiserver k8s.io/kubernetes/cmd/kubectl \
  k8s.io/kubernetes/cmd/kube-proxy k8s.io/kubernetes/cmd/kubemark
echo "e2e: building Prometheus, with Kubernetes service discovery alone"
cd prometheus
"$go" build -tags remove_all_sd,enable_kubernetes_sd -trimpath -ldflags="-s -w" -o "$folder" \
  github.com/prometheus/prometheus/cmd/prometheus
cd ../../crds
echo "e2e: fetching definitions of cert-manager, Prometheus Operator and Gateway API"
"$go" mod download
rm -rf "$folder/crds"
mkdir "$folder/crds"
definition() {
  cp "$("$go" list -m -f '{{.Dir}}' "$1")/$2" "$folder/crds"
}
definition github.com/cert-manager/cert-manager deploy/crds/cert-manager.io_certificates.yaml
for kind in podmonitors prometheusrules servicemonitors; do
  definition github.com/prometheus-operator/prometheus-operator \
    "example/prometheus-operator-crd/monitoring.coreos.com_$kind.yaml"
done
definition sigs.k8s.io/gateway-api config/crd/experimental/gateway.networking.k8s.io_tlsroutes.yaml
