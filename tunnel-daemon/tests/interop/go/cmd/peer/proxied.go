package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"strings"
	"time"

	"golang.org/x/net/proxy"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
)

// targetName leads to loopback only where the agent resolves it. "localhost" and loopback addresses are no use: Go goes past the
// proxies of its environment for them.
const targetName = "target.localhost"

// certificateName is a name in httptest's certificate.
const certificateName = "example.com"

const proxiedBody = "hello through a proxy\n"

// proxied runs one of Go's proxy clients against targets of its own on loopback.
func proxied(args []string) (Result, error) {
	clients := map[string]func(context.Context, *proxiedTargets, string) error{
		"net-http":        viaEnvironment,
		"net-http-socks5": viaSocksURL,
		"socks5":          viaSocksDialer,
		"grpc":            viaGRPC,
	}
	f := flag.NewFlagSet("proxied", flag.ExitOnError)
	name := f.String("client", "", "net-http, net-http-socks5, socks5 or grpc")
	at := f.String("proxy", "", "host:port of the proxy")
	closedPort := f.Int("closed-port", 0, "port of 127.0.0.1 that refuses connections")
	timeout := f.Duration("timeout", 20*time.Second, "limit of the whole subcommand")
	_ = f.Parse(args) // ExitOnError
	client, found := clients[*name]
	if !found || *at == "" || *closedPort == 0 {
		return nil, errors.New("proxied needs --client, --proxy and --closed-port")
	}
	targets, err := startProxiedTargets()
	if err != nil {
		return nil, err
	}
	targets.closed = named(*closedPort)
	ctx, cancel := context.WithTimeout(context.Background(), *timeout)
	defer cancel()
	return nil, client(ctx, targets, *at)
}

// proxiedTargets are an HTTP server without TLS, one with TLS and HTTP/2, a gRPC server of each kind, and a port that refuses.
type proxiedTargets struct {
	plain, secure         string
	grpcPlain, grpcSecure string
	closed                string
	roots                 *x509.CertPool
}

func startProxiedTargets() (*proxiedTargets, error) {
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			_, _ = io.Copy(w, r.Body)
			return
		}
		_, _ = io.WriteString(w, proxiedBody)
	})
	plain := httptest.NewServer(handler)
	secure := httptest.NewUnstartedServer(handler)
	secure.EnableHTTP2 = true
	secure.StartTLS()
	targets := &proxiedTargets{
		plain:  named(port(plain.Listener)),
		secure: named(port(secure.Listener)),
		roots:  x509.NewCertPool(),
	}
	targets.roots.AddCert(secure.Certificate())
	certificates := secure.TLS.Certificates
	for _, one := range []struct {
		address *string
		options []grpc.ServerOption
	}{
		{&targets.grpcPlain, nil},
		{&targets.grpcSecure, []grpc.ServerOption{grpc.Creds(credentials.NewServerTLSFromCert(&certificates[0]))}},
	} {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		*one.address = named(port(listener))
		server := grpc.NewServer(one.options...)
		grpc_health_v1.RegisterHealthServer(server, health.NewServer())
		go func() { _ = server.Serve(listener) }()
	}
	return targets, nil
}

func port(listener net.Listener) int { return listener.Addr().(*net.TCPAddr).Port }

// named is the address of a target as clients of a proxy name it.
func named(port int) string { return fmt.Sprintf("%s:%d", targetName, port) }

func (t *proxiedTargets) tls() *tls.Config {
	return &tls.Config{RootCAs: t.roots, ServerName: certificateName}
}

// onlyProxies makes these the environment's only proxy variables. Both net/http and grpc-go read the environment once.
func onlyProxies(variables map[string]string) {
	for _, name := range []string{"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "REQUEST_METHOD"} {
		_ = os.Unsetenv(name)
		_ = os.Unsetenv(strings.ToLower(name))
	}
	for name, value := range variables {
		_ = os.Setenv(name, value)
	}
}

// viaEnvironment is net/http as most programs use it. Requests to the plain target have a whole URL, those to the one with TLS
// go through a CONNECT.
func viaEnvironment(ctx context.Context, targets *proxiedTargets, at string) error {
	onlyProxies(map[string]string{"HTTP_PROXY": "http://" + at, "HTTPS_PROXY": "http://" + at})
	transport := &http.Transport{
		Proxy:             http.ProxyFromEnvironment,
		TLSClientConfig:   targets.tls(),
		ForceAttemptHTTP2: true,
	}
	if err := exchangeBoth(ctx, transport, targets); err != nil {
		return err
	}
	return refusedByStatus(ctx, transport, targets.closed)
}

// viaSocksURL is net/http's own SOCKS5 client.
func viaSocksURL(ctx context.Context, targets *proxiedTargets, at string) error {
	transport := &http.Transport{
		Proxy:             http.ProxyURL(&url.URL{Scheme: "socks5", Host: at}),
		TLSClientConfig:   targets.tls(),
		ForceAttemptHTTP2: true,
	}
	return exchangeBoth(ctx, transport, targets)
}

// viaSocksDialer is the dialler of x/net/proxy: below net/http, and by itself.
func viaSocksDialer(ctx context.Context, targets *proxiedTargets, at string) error {
	dialer, err := proxy.SOCKS5("tcp", at, nil, proxy.Direct)
	if err != nil {
		return err
	}
	transport := &http.Transport{
		DialContext:       dialer.(proxy.ContextDialer).DialContext,
		TLSClientConfig:   targets.tls(),
		ForceAttemptHTTP2: true,
	}
	if err := exchangeBoth(ctx, transport, targets); err != nil {
		return err
	}
	const refused = "connection refused"
	conn, err := dialer.Dial("tcp", targets.closed)
	if err == nil {
		_ = conn.Close()
		return errors.New("a closed port is open")
	}
	if !strings.Contains(err.Error(), refused) {
		return fmt.Errorf("%w, instead of: %s", err, refused)
	}
	return nil
}

// exchangeBoth tries the HTTP target without TLS and the one with it.
func exchangeBoth(ctx context.Context, transport *http.Transport, targets *proxiedTargets) error {
	defer transport.CloseIdleConnections()
	for _, one := range []struct {
		url   string
		major int
	}{
		{"http://" + targets.plain + "/", 1},
		{"https://" + targets.secure + "/", 2},
	} {
		if err := exchange(ctx, transport, one.url, one.major); err != nil {
			return fmt.Errorf("%s: %w", one.url, err)
		}
	}
	return nil
}

// exchange gets a short body and posts one that comes back, over HTTP of this major version.
func exchange(ctx context.Context, transport http.RoundTripper, target string, major int) error {
	const postedBytes = 3_000_000
	posted := strings.Repeat("0123456789abcde\n", postedBytes/16)
	for _, one := range []struct{ method, sent, want string }{
		{http.MethodGet, "", proxiedBody},
		{http.MethodPost, posted, posted},
	} {
		request, err := http.NewRequestWithContext(ctx, one.method, target, strings.NewReader(one.sent))
		if err != nil {
			return err
		}
		response, err := transport.RoundTrip(request)
		if err != nil {
			return err
		}
		body, err := io.ReadAll(response.Body)
		_ = response.Body.Close()
		if err != nil {
			return err
		}
		if response.StatusCode != http.StatusOK || response.ProtoMajor != major || string(body) != one.want {
			return fmt.Errorf("%s: %s %s with %d bytes", one.method, response.Proto, response.Status, len(body))
		}
	}
	return nil
}

// refusedByStatus asks for a closed port: by a whole URL, whose answer is the proxy's, and by a CONNECT, whose status is an error.
func refusedByStatus(ctx context.Context, transport http.RoundTripper, closed string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+closed+"/", nil)
	if err != nil {
		return err
	}
	response, err := transport.RoundTrip(request)
	if err != nil {
		return err
	}
	_ = response.Body.Close()
	if response.StatusCode != http.StatusBadGateway {
		return fmt.Errorf("a closed port: %s", response.Status)
	}
	request.URL.Scheme = "https"
	response, err = transport.RoundTrip(request)
	if err == nil {
		_ = response.Body.Close()
		return fmt.Errorf("a closed port behind a CONNECT: %s", response.Status)
	}
	if !strings.Contains(err.Error(), http.StatusText(http.StatusBadGateway)) {
		return fmt.Errorf("a closed port behind a CONNECT: %w", err)
	}
	return nil
}

// viaGRPC makes calls with and without TLS. grpc-go reads HTTPS_PROXY for both.
func viaGRPC(ctx context.Context, targets *proxiedTargets, at string) error {
	onlyProxies(map[string]string{"HTTPS_PROXY": "http://" + at})
	for _, one := range []struct {
		address string
		creds   credentials.TransportCredentials
	}{
		{targets.grpcPlain, insecure.NewCredentials()},
		{targets.grpcSecure, credentials.NewTLS(targets.tls())},
	} {
		if err := checkHealth(ctx, one.address, one.creds); err != nil {
			return fmt.Errorf("%s, %s: %w", one.address, one.creds.Info().SecurityProtocol, err)
		}
	}
	return nil
}

func checkHealth(ctx context.Context, address string, creds credentials.TransportCredentials) error {
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(creds))
	if err != nil {
		return err
	}
	defer conn.Close()
	answer, err := grpc_health_v1.NewHealthClient(conn).Check(ctx, &grpc_health_v1.HealthCheckRequest{})
	if err != nil {
		return err
	}
	if answer.Status != grpc_health_v1.HealthCheckResponse_SERVING {
		return fmt.Errorf("it is %s", answer.Status)
	}
	return nil
}
