// Package suite only pins what upstream's integration suite needs.
//
// The suite is a package without any file but tests, so nothing can import it and `go mod tidy` does not see its
// needs. The imports below are those of its test files that no other package of upstream brings in.
package suite

import (
	_ "go.uber.org/goleak"
	_ "sigs.k8s.io/apiserver-network-proxy/konnectivity-client/pkg/common/metrics/testing"
	_ "sigs.k8s.io/apiserver-network-proxy/tests/framework"
)
