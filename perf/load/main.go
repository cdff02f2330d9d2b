// Command load measures a running server and agent through their frontend, and prints one JSON object.
//
//	load target                     serve the targets, print their ports, until stdin closes
//	load certs DIR                  write a throw-away CA and certificates
//	load run --mode= --uds= ...     measure; see its flags
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"adit.invalid/interop/target"
	"adit.invalid/interop/tunnel"
)

// load is what all measurements share.
type load struct {
	dialer  tunnel.Dialer
	ports   target.Ports
	server  int
	agent   int
	lasting time.Duration
	idle    int
}

func main() {
	if len(os.Args) < 2 {
		fail("usage: load target | certs DIR | run --help")
	}
	switch os.Args[1] {
	case "target":
		set, err := target.Start()
		check(err)
		check(json.NewEncoder(os.Stdout).Encode(set.Ports))
		_, _ = io.Copy(io.Discard, os.Stdin)
	case "certs":
		if len(os.Args) != 3 {
			fail("usage: load certs DIR")
		}
		check(writeCerts(os.Args[2]))
	case "run":
		run(os.Args[2:])
	default:
		fail("unknown subcommand " + os.Args[1])
	}
}

func run(args []string) {
	l := load{}
	var ports, only string
	f := flag.NewFlagSet("run", flag.ExitOnError)
	f.StringVar(&l.dialer.Mode, "mode", tunnel.GRPC, "grpc or http-connect")
	f.StringVar(&l.dialer.Socket, "uds", "", "unix socket of the frontend")
	f.StringVar(&ports, "ports", "", "what `load target` printed")
	f.IntVar(&l.server, "server-pid", 0, "process whose memory and CPU count as the server's")
	f.IntVar(&l.agent, "agent-pid", 0, "the same for the agent")
	f.DurationVar(&l.lasting, "for", time.Second, "length of each timed measurement")
	f.IntVar(&l.idle, "idle", 2000, "idle tunnels to weigh")
	f.StringVar(&only, "only", "", "comma list of measurements; empty = all")
	_ = f.Parse(args) // ExitOnError
	check(json.Unmarshal([]byte(ports), &l.ports))

	result := map[string]float64{}
	for _, m := range measurements() {
		if only != "" && !strings.Contains(","+only+",", ","+m.name+",") {
			continue
		}
		if err := m.run(&l, result); err != nil {
			fail(fmt.Sprintf("%s: %v", m.name, err))
		}
	}
	check(json.NewEncoder(os.Stdout).Encode(result))
}

type measurement struct {
	name string
	run  func(l *load, result map[string]float64) error
}

func measurements() []measurement {
	return []measurement{
		{"idle", (*load).idleMemory}, // first: later ones leave buffers behind
		{"echo", (*load).echoes},
		{"dials", (*load).dials},
		{"bulk", (*load).bulks},
		{"isolation", (*load).isolation},
	}
}

func (l *load) address(port int) string { return "127.0.0.1:" + strconv.Itoa(port) }

func check(err error) {
	if err != nil {
		fail(err.Error())
	}
}

func fail(text string) {
	fmt.Fprintln(os.Stderr, "load: "+text)
	os.Exit(1)
}
