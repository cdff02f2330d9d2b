//go:build reusable

package tunnel

import (
	"context"

	"sigs.k8s.io/apiserver-network-proxy/konnectivity-client/pkg/client"
)

func init() {
	openReusable = func(ctx context.Context, d Dialer) (reusable, error) {
		return client.CreateGRPCTunnel(ctx, d.Socket, d.Options()...)
	}
}
