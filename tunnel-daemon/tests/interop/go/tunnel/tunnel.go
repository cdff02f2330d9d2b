// Package tunnel dials through a proxy server the way kube-apiserver does, in both of its dialects.
package tunnel

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"sigs.k8s.io/apiserver-network-proxy/konnectivity-client/pkg/client"
)

// The two dialects of a frontend.
const (
	GRPC        = "grpc"
	HTTPConnect = "http-connect"
)

// Dialer opens tunnels through the frontend at a unix socket.
type Dialer struct {
	// Mode is GRPC or HTTPConnect.
	Mode string
	// Socket is the path of the unix socket.
	Socket string
	// TLS, unless it is nil, is for a frontend that listens on TCP: then Socket is its address.
	TLS *tls.Config
	// Authority replaces the :authority of the gRPC connection; empty keeps what gRPC-Go derives from the path.
	Authority string
	// TunnelContext bounds the life of each gRPC tunnel; nil means no bound, as kube-apiserver has it.
	TunnelContext context.Context
	// Reused, unless it is nil, opens gRPC tunnels on one connection.
	Reused *Reused
	// Failed, unless it is nil, is called when the dial of a gRPC tunnel has failed, with what is closed once that tunnel has
	// ended; its context ends afterwards.
	Failed func(done <-chan struct{})
}

// reusable is a connection that opens a tunnel for each dial.
type reusable interface {
	DialContext(ctx context.Context, protocol, address string) (net.Conn, error)
	Close() error
}

// openReusable connects; nil where the client library has no tunnel that is used again.
var openReusable func(ctx context.Context, d Dialer) (reusable, error)

// Reused is one connection for many gRPC tunnels.
type Reused struct {
	connection reusable
}

// Reuse connects to the socket.
func (d Dialer) Reuse(ctx context.Context) (*Reused, error) {
	if openReusable == nil {
		return nil, errors.New("this client library has no tunnel that is used again: v0.37.0 does")
	}
	connection, err := openReusable(ctx, d)
	if err != nil {
		return nil, err
	}
	return &Reused{connection}, nil
}

// Close ends all tunnels of the connection.
func (r *Reused) Close() error {
	return r.connection.Close()
}

// Conn is an open tunnel.
type Conn struct {
	net.Conn
	// Done is closed when the tunnel has ended for good; nil in HTTP-CONNECT mode, where closing the socket is the end.
	Done <-chan struct{}

	once     sync.Once
	closeErr error
}

// Close closes the tunnel; only the first call does anything, and all return what it returned.
func (c *Conn) Close() error {
	c.once.Do(func() { c.closeErr = c.Conn.Close() })
	return c.closeErr
}

// Ended waits for the end of a closed tunnel.
func (c *Conn) Ended(within time.Duration) bool {
	if c.Done == nil {
		return true
	}
	select {
	case <-c.Done:
		return true
	case <-time.After(within):
		return false
	}
}

// StatusError is an answer to CONNECT other than 200.
type StatusError struct {
	Code int
	Body string
}

func (e *StatusError) Error() string {
	return fmt.Sprintf("proxy answered %d %s: %s", e.Code, http.StatusText(e.Code), e.Body)
}

// Dial opens one tunnel to the target. The context bounds only the dial.
func (d Dialer) Dial(ctx context.Context, target string) (*Conn, error) {
	switch d.Mode {
	case GRPC:
		return d.dialGRPC(ctx, target)
	case HTTPConnect:
		return d.dialConnect(ctx, target)
	default:
		return nil, fmt.Errorf("unknown mode %q: use %s or %s", d.Mode, GRPC, HTTPConnect)
	}
}

// DialContext has the shape that http.Transport wants.
func (d Dialer) DialContext(ctx context.Context, _, target string) (net.Conn, error) {
	conn, err := d.Dial(ctx, target)
	if err != nil {
		return nil, err
	}
	return conn, nil
}

// Options are the gRPC dial options for the socket: plain text, a dialer of our own, wait until connected.
func (d Dialer) Options() []grpc.DialOption {
	network, secured := "unix", insecure.NewCredentials()
	if d.TLS != nil {
		network, secured = "tcp", credentials.NewTLS(d.TLS)
	}
	options := []grpc.DialOption{
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, d.Socket)
		}),
		grpc.WithTransportCredentials(secured),
		grpc.WithBlock(),                 //nolint:staticcheck // what kube-apiserver does
		grpc.WithReturnConnectionError(), //nolint:staticcheck // the same
	}
	if d.Authority != "" {
		options = append(options, grpc.WithAuthority(d.Authority))
	}
	return options
}

func (d Dialer) dialGRPC(ctx context.Context, target string) (*Conn, error) {
	if d.Reused != nil {
		conn, err := d.Reused.connection.DialContext(ctx, "tcp", target)
		if err != nil {
			return nil, err
		}
		return &Conn{Conn: conn}, nil
	}
	life := d.TunnelContext
	if life == nil {
		life = context.Background()
	}
	life, cancel := context.WithCancel(life)
	// The socket path itself is the gRPC target, so it becomes the :authority.
	single, err := client.CreateSingleUseGrpcTunnelWithContext(ctx, life, d.Socket, d.Options()...)
	if err != nil {
		cancel()
		return nil, err
	}
	conn, err := single.DialContext(ctx, "tcp", target)
	if err != nil {
		if d.Failed != nil {
			d.Failed(single.Done())
		}
		// Let the library send its DIAL_CLS first: it does so in the background when the context ended.
		select {
		case <-single.Done():
		case <-time.After(200 * time.Millisecond):
		}
		cancel()
		return nil, err
	}
	go func() {
		<-single.Done()
		cancel()
	}()
	return &Conn{Conn: conn, Done: single.Done()}, nil
}

func (d Dialer) dialConnect(ctx context.Context, target string) (*Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", d.Socket)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	err = connect(conn, target)
	if !stop() {
		err = errors.Join(ctx.Err(), err)
	}
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	return &Conn{Conn: conn}, nil
}

// connect does the handshake. Like kube-apiserver it takes any byte behind the header for an error.
func connect(conn net.Conn, target string) error {
	request := "CONNECT " + target + " HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
	if _, err := io.WriteString(conn, request); err != nil {
		return fmt.Errorf("writing CONNECT: %w", err)
	}
	reader := bufio.NewReader(conn)
	response, err := http.ReadResponse(reader, &http.Request{Method: http.MethodConnect})
	if err != nil {
		return fmt.Errorf("reading the answer to CONNECT: %w", err)
	}
	if response.StatusCode != http.StatusOK {
		// To a CONNECT request net/http attaches no body, so what follows is read from the connection.
		body, readErr := io.ReadAll(io.LimitReader(reader, 64<<10))
		return errors.Join(&StatusError{Code: response.StatusCode, Body: strings.TrimSpace(string(body))}, readErr)
	}
	if n := reader.Buffered(); n > 0 {
		return fmt.Errorf("unexpected %d bytes of buffered data from CONNECT proxy", n)
	}
	return nil
}
