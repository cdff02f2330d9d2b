// Command go-load measures a running server through its frontend with the Go client library, and prints one JSON object.
//
// It takes the flags, the plan and the names of measurements of adit-load, so that both fill one table.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"adit.invalid/interop/tunnel"
)

// targets are the addresses that `adit-load target` printed.
type targets struct {
	Echo   string `json:"echo"`
	Source string `json:"source"`
	Sink   string `json:"sink"`
}

// load is what all measurements share.
type load struct {
	plan      plan
	dialer    tunnel.Dialer
	targets   targets
	control   string
	processes processes
	values    map[string]float64
}

func main() {
	if len(os.Args) < 2 || os.Args[1] != "run" {
		fail("usage: go-load run --help")
	}
	l := load{values: map[string]float64{}}
	var targetsJSON, planJSON string
	f := flag.NewFlagSet("run", flag.ExitOnError)
	f.StringVar(&l.dialer.Mode, "way", tunnel.GRPC, "grpc or http-connect")
	reuse := f.Bool("reuse", false, "one connection for all gRPC tunnels")
	certs := f.String("certs", "", "folder of a client's certificate: the frontend is ADDRESS:PORT with TLS")
	f.StringVar(&l.dialer.Socket, "frontend", "", "unix socket of the frontend")
	f.StringVar(&targetsJSON, "targets", "", "what `adit-load target` printed")
	f.StringVar(&l.control, "control", "", "where the targets tell what arrived, reached without the measured path")
	f.Var(&l.processes, "process", "ROLE=PID of a process whose memory and CPU time count; any number")
	f.StringVar(&planJSON, "plan", "", "what to measure, as JSON")
	_ = f.Parse(os.Args[2:]) // ExitOnError
	check(json.Unmarshal([]byte(targetsJSON), &l.targets))
	strict := json.NewDecoder(strings.NewReader(planJSON))
	strict.DisallowUnknownFields()
	check(strict.Decode(&l.plan))

	if *certs != "" {
		config, err := clientTLS(*certs)
		check(err)
		l.dialer.TLS = config
	}
	if *reuse {
		reused, err := l.dialer.Reuse(context.Background())
		check(err)
		defer func() { _ = reused.Close() }()
		l.dialer.Reused = reused
	}

	for _, m := range []struct {
		name string
		run  func(*load) error
	}{
		{"burst", (*load).bursts}, // first: it is cold only on a fresh path
		{"idle", (*load).idle},    // before others: later ones leave buffers behind
		{"echo", (*load).echoes},
		{"paced", (*load).paced},
		{"dials", (*load).dials},
		{"bulk", (*load).bulks},
		{"mixed", (*load).mixed},
		{"isolation", (*load).isolation},
		{"counted", (*load).count},
	} {
		if !slices.Contains(l.plan.Measurements, m.name) {
			continue
		}
		if err := m.run(&l); err != nil {
			fail(fmt.Sprintf("%s: %v", m.name, err))
		}
	}
	check(json.NewEncoder(os.Stdout).Encode(map[string]any{"values": l.values}))
}

// clientTLS reads what `adit-load certs` has written.
func clientTLS(folder string) (*tls.Config, error) {
	pair, err := tls.LoadX509KeyPair(filepath.Join(folder, "agent.pem"), filepath.Join(folder, "agent.key"))
	if err != nil {
		return nil, err
	}
	authority, err := os.ReadFile(filepath.Join(folder, "ca.pem"))
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(authority) {
		return nil, errors.New("ca.pem has no certificate")
	}
	return &tls.Config{Certificates: []tls.Certificate{pair}, RootCAs: roots, ServerName: "localhost"}, nil
}

// askSink returns a function that asks how many bytes have arrived at the sinks.
func (l *load) askSink() (func() (int64, error), func(), error) {
	conn, err := net.DialTimeout("tcp", l.control, 5*time.Second)
	if err != nil {
		return nil, nil, err
	}
	ask := func() (int64, error) {
		if _, err := fmt.Fprintln(conn, "received"); err != nil {
			return 0, err
		}
		var count int64
		_, err := fmt.Fscanln(conn, &count)
		return count, err
	}
	return ask, func() { _ = conn.Close() }, nil
}

func check(err error) {
	if err != nil {
		fail(err.Error())
	}
}

func fail(text string) {
	fmt.Fprintln(os.Stderr, "go-load: "+text)
	os.Exit(1)
}
