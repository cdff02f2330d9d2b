// Command go-proxy stands for HyperShift's konnectivity-socks5-proxy and konnectivity-https-proxy in `cargo xtask perf`. Like them it
// serves clients by the libraries go-socks5 and goproxy, and for each dial opens a TLS connection with a client certificate to the
// server, on which it sends one CONNECT.
//
// Names, clouds' APIs and customers' proxies are left out, since the load dials addresses. So are HyperShift's log lines, which cost
// CPU time for each request: what is measured here is a lower bound of theirs. Flags have HyperShift's names.
package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/armon/go-socks5"
	"github.com/elazarl/goproxy"
)

// dialLimit is HyperShift's time for a connection to the server, and again for the answer to CONNECT.
const dialLimit = 60 * time.Second

func main() {
	if len(os.Args) < 2 {
		log.Fatal("usage: go-proxy konnectivity-socks5-proxy|konnectivity-https-proxy FLAGS")
	}
	flags := flag.NewFlagSet(os.Args[1], flag.ExitOnError)
	host := flags.String("konnectivity-hostname", "localhost", "host of the server")
	port := flags.Uint("konnectivity-port", 8090, "port of the server's http-connect frontend")
	serving := flags.Uint("serving-port", 8090, "port to listen on")
	ca := flags.String("ca-cert-path", "", "CA of the server's certificate")
	cert := flags.String("tls-cert-path", "", "client certificate")
	key := flags.String("tls-key-path", "", "key of the client certificate")
	// It exits on an error.
	_ = flags.Parse(os.Args[2:])

	config, err := clientTLS(*host, *ca, *cert, *key)
	if err != nil {
		log.Fatal(err)
	}
	server := fmt.Sprintf("%s:%d", *host, *port)
	dial := func(ctx context.Context, _, address string) (net.Conn, error) {
		return dialThrough(ctx, server, config, address)
	}
	// HyperShift's listen on all addresses.
	listen := fmt.Sprintf("127.0.0.1:%d", *serving)
	switch os.Args[1] {
	case "konnectivity-socks5-proxy":
		proxy, err := socks5.New(&socks5.Config{Dial: dial})
		if err != nil {
			log.Fatal(err)
		}
		log.Fatal(proxy.ListenAndServe("tcp", listen))
	case "konnectivity-https-proxy":
		proxy := goproxy.NewProxyHttpServer()
		proxy.Tr = &http.Transport{DialContext: dial}
		log.Fatal(http.ListenAndServe(listen, proxy))
	default:
		log.Fatalf("no such proxy: %s", os.Args[1])
	}
}

// clientTLS reads the certificates once, as HyperShift does.
func clientTLS(host, ca, cert, key string) (*tls.Config, error) {
	pem, err := os.ReadFile(ca)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s: no certificate", ca)
	}
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		RootCAs:      roots,
		Certificates: []tls.Certificate{pair},
		MinVersion:   tls.VersionTLS12,
		ServerName:   host,
	}, nil
}

// dialThrough opens a connection to the server for one tunnel to address.
func dialThrough(ctx context.Context, server string, config *tls.Config, address string) (net.Conn, error) {
	dialer := &tls.Dialer{NetDialer: &net.Dialer{Timeout: dialLimit}, Config: config}
	conn, err := dialer.DialContext(ctx, "tcp", server)
	if err != nil {
		return nil, err
	}
	if err := connect(conn, address); err != nil {
		conn.Close()
		return nil, fmt.Errorf("CONNECT %s by %s: %w", address, server, err)
	}
	return conn, nil
}

// connect sends CONNECT and reads its answer.
func connect(conn net.Conn, address string) error {
	if err := conn.SetDeadline(time.Now().Add(dialLimit)); err != nil {
		return err
	}
	if _, err := fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", address, address); err != nil {
		return err
	}
	reader := bufio.NewReader(conn)
	response, err := http.ReadResponse(reader, nil)
	if err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("answered %s", response.Status)
	}
	// The client speaks first, so the reader holds no byte of the target that would be lost with it.
	if reader.Buffered() > 0 {
		return fmt.Errorf("%d bytes behind the answer", reader.Buffered())
	}
	return conn.SetDeadline(time.Time{})
}
