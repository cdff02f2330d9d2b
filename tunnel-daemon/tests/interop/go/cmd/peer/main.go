// Command peer is the Go side of the interop tests: clients of a proxy server (on the upstream client library and on the
// raw stub), targets behind an agent, a stub agent and a stub server that misbehave on request.
//
// A client subcommand prints one JSON object and exits 0 when what it tried succeeded, 1 when not, 2 for wrong usage.
// The long-running ones (target, agent-stub, server-stub, stall, tap) print one JSON object a line and end with their stdin.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"adit.invalid/interop/tunnel"
	"k8s.io/klog/v2"
	"sigs.k8s.io/apiserver-network-proxy/konnectivity-client/pkg/client"
)

// Result is what a subcommand reports.
type Result map[string]any

type command struct {
	name string
	help string
	run  func(args []string) (Result, error)
}

func commands() []command {
	return []command{
		{"get", "HTTP GET through one tunnel", get},
		{"echo", "messages to an echo target, byte for byte", echoMessages},
		{"banner", "read what a server-first target says", readBanner},
		{"bulk-down", "patterned bytes from a source target", bulkDown},
		{"bulk-up", "patterned bytes to a sink target", bulkUp},
		{"dial-fail", "a dial that should fail; reports text and reason", dialFail},
		{"concurrent", "many tunnels at once, each with its own requests", concurrent},
		{"slow-read", "a client that reads slowly", slowRead},
		{"stall", "clients that never read, until stdin closes", stall},
		{"wrong", "packets no honest client sends, on the raw stub", wrong},
		{"many-streams", "many Proxy streams on one HTTP/2 connection", manyStreams},
		{"target", "all targets; prints their ports", runTarget},
		{"agent-stub", "an agent made of packets", agentStub},
		{"server-stub", "a server made of packets", serverStub},
		{"tap", "between agents and a server, reports what only frames show", runTap},
		{"proxied", "one of Go's own proxy clients, to targets of its own", proxied},
		{"offline", "a program, beside a name server that knows no name", runOffline},
	}
}

func main() {
	klog.InitFlags(flag.CommandLine)
	_ = flag.CommandLine.Set("logtostderr", "true")
	if len(os.Args) < 2 {
		usage()
	}
	for _, c := range commands() {
		if c.name != os.Args[1] {
			continue
		}
		start := time.Now()
		result, err := c.run(os.Args[2:])
		if result == nil {
			result = Result{}
		}
		describe(result, err)
		result["elapsed_ms"] = time.Since(start).Milliseconds()
		emit(result)
		if err != nil {
			os.Exit(1)
		}
		return
	}
	usage()
}

func usage() {
	fmt.Fprintln(os.Stderr, "usage: peer SUBCOMMAND [flags]; -h after a subcommand lists its flags")
	for _, c := range commands() {
		fmt.Fprintf(os.Stderr, "  %-13s %s\n", c.name, c.help)
	}
	os.Exit(2)
}

// describe adds how the subcommand ended: the text, the library's reason, the HTTP status where there is one.
func describe(result Result, err error) {
	result["ok"] = err == nil
	if err == nil {
		return
	}
	result["error"] = err.Error()
	isDialFailure, reason := client.GetDialFailureReason(err)
	result["is_dial_failure"] = isDialFailure
	result["reason"] = string(reason)
	var status *tunnel.StatusError
	if errors.As(err, &status) {
		result["status"] = status.Code
		result["body"] = status.Body
	}
}

var emitLock sync.Mutex

// emit writes one JSON object and a newline; safe from several goroutines.
func emit(value any) {
	emitLock.Lock()
	defer emitLock.Unlock()
	_ = json.NewEncoder(os.Stdout).Encode(value)
}

// clientFlags are the flags every client subcommand has.
type clientFlags struct {
	*flag.FlagSet
	dialer  tunnel.Dialer
	target  string
	timeout time.Duration
}

func newClientFlags(name string) *clientFlags {
	f := &clientFlags{FlagSet: flag.NewFlagSet(name, flag.ExitOnError)}
	f.StringVar(&f.dialer.Mode, "mode", tunnel.GRPC, "grpc or http-connect")
	f.StringVar(&f.dialer.Socket, "uds", "", "unix socket of the frontend")
	f.StringVar(&f.dialer.Authority, "authority", "", "send this :authority instead of the one made from the path")
	f.StringVar(&f.target, "target", "", "host:port to dial")
	f.DurationVar(&f.timeout, "timeout", 20*time.Second, "limit of the whole subcommand, or of the dial where it says so")
	return f
}

func (f *clientFlags) parse(args []string) {
	_ = f.Parse(args) // ExitOnError
	if f.dialer.Socket == "" || f.target == "" {
		fmt.Fprintf(os.Stderr, "%s needs --uds and --target\n", f.Name())
		os.Exit(2)
	}
}

// open dials the target within the timeout.
func (f *clientFlags) open() (*tunnel.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), f.timeout)
	defer cancel()
	return f.dialer.Dial(ctx, f.target)
}

// stdinClosed is closed when whoever started us closes our stdin or goes away.
func stdinClosed() <-chan struct{} {
	closed := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		close(closed)
	}()
	return closed
}
