// Modules with kinds of others that the Helm chart makes objects of, for `cargo xtask e2e`: it fetches their definitions, and builds
// nothing. `go mod tidy` would leave them out.
module adit.invalid/crds

go 1.26.0

require (
	github.com/cert-manager/cert-manager v1.19.1
	github.com/prometheus-operator/prometheus-operator v0.84.0
	sigs.k8s.io/gateway-api v1.5.0
)
