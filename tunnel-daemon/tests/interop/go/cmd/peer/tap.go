package main

import (
	"bufio"
	"crypto/tls"
	"encoding/binary"
	"flag"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// What a tap looks at in HTTP/2 (RFC 9113, sections 3.4, 4.1 and 6).
const (
	preface           = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
	frameHead         = 9
	frameHeaders      = 1
	framePing         = 6
	frameGoAway       = 7
	frameContinuation = 9
	flagAck           = 1
	flagEndHeaders    = 4
)

// tapMark is the content of a tap's own pings, by which their answers are told from those to the agent's.
const tapMark = "tap ping"

// tapper stands between agents and a server, and sees the frames that pass in clear.
type tapper struct {
	server  string
	toward  *tls.Config
	pings   int
	every   time.Duration
	pinging atomic.Bool
}

// runTap carries agents' connections to a server, frame by frame, until stdin closes. It reports every GOAWAY of the
// server, every ping of an agent, and who ended a connection. On the first connection it may ping the server in the
// agent's name, more often than any agent does.
func runTap(args []string) (Result, error) {
	f := flag.NewFlagSet("tap", flag.ExitOnError)
	var agent, shown tlsFlags
	agent.add(f)
	f.StringVar(&shown.cert, "server-cert", "", "certificate shown to agents")
	f.StringVar(&shown.key, "server-key", "", "its key")
	t := &tapper{}
	f.StringVar(&t.server, "server", "", "host:port of the server's agent listener")
	f.IntVar(&t.pings, "pings", 0, "pings of our own, once the server has answered the first call")
	f.DurationVar(&t.every, "every", 100*time.Millisecond, "time between them")
	_ = f.Parse(args) // ExitOnError
	shown.ca = agent.ca

	toward, roots, err := agent.load()
	if err != nil {
		return nil, err
	}
	toward.RootCAs = roots
	toward.NextProtos = []string{"h2"}
	t.toward = toward
	facing, clients, err := shown.load()
	if err != nil {
		return nil, err
	}
	facing.ClientCAs = clients
	facing.ClientAuth = tls.RequireAndVerifyClientCert
	facing.NextProtos = []string{"h2"}
	listener, err := tls.Listen("tcp", "127.0.0.1:0", facing)
	if err != nil {
		return nil, err
	}
	emit(Result{"event": "listening", "port": listener.Addr().(*net.TCPAddr).Port})
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go t.carry(conn)
		}
	}()
	<-stdinClosed()
	return Result{}, nil
}

// carry serves one agent's connection to its end.
func (t *tapper) carry(agent net.Conn) {
	defer agent.Close()
	server, err := tls.Dial("tcp", t.server, t.toward)
	if err != nil {
		emit(Result{"event": "unreachable", "error": err.Error()})
		return
	}
	defer server.Close()
	var once sync.Once
	over := func(by string) {
		once.Do(func() { emit(Result{"event": "closed", "by": by}) })
		_ = agent.Close()
		_ = server.Close()
	}
	sender := &frameSender{to: server}
	var group sync.WaitGroup
	group.Go(func() {
		fromAgent(agent, sender)
		over("agent")
	})
	group.Go(func() {
		t.fromServer(server, agent, sender)
		over("server")
	})
	group.Wait()
}

// fromAgent passes an agent's frames on.
func fromAgent(agent io.Reader, sender *frameSender) {
	reader := bufio.NewReaderSize(agent, 64<<10)
	greeting := make([]byte, len(preface))
	if _, err := io.ReadFull(reader, greeting); err != nil {
		return
	}
	if err := sender.raw(greeting); err != nil {
		return
	}
	for {
		next, err := readFrame(reader)
		if err != nil {
			return
		}
		if next.kind == framePing && next.flags&flagAck == 0 {
			emit(Result{"event": "ping"})
		}
		if err := sender.pass(next); err != nil {
			return
		}
	}
}

// fromServer passes a server's frames on, except for answers to pings that were not the agent's.
func (t *tapper) fromServer(server io.Reader, agent io.Writer, sender *frameSender) {
	reader := bufio.NewReaderSize(server, 64<<10)
	answered := 0
	for {
		next, err := readFrame(reader)
		if err != nil {
			return
		}
		switch {
		case next.kind == frameGoAway:
			emit(goAway(next))
		case next.kind == framePing && next.flags&flagAck != 0 && string(next.payload()) == tapMark:
			answered++
			emit(Result{"event": "answered", "n": answered})
			continue
		case next.kind == frameHeaders && t.pings > 0 && t.pinging.CompareAndSwap(false, true):
			go t.ping(sender)
		}
		if _, err := agent.Write(next.raw); err != nil {
			return
		}
	}
}

func (t *tapper) ping(sender *frameSender) {
	tick := time.NewTicker(t.every)
	defer tick.Stop()
	for sent := 0; sent < t.pings; {
		<-tick.C
		done, err := sender.ping()
		if err != nil {
			return
		}
		if done {
			sent++
		}
	}
}

// frame is one HTTP/2 frame; raw is all of it.
type frame struct {
	kind, flags byte
	raw         []byte
}

func (f frame) payload() []byte { return f.raw[frameHead:] }

func readFrame(from io.Reader) (frame, error) {
	head := make([]byte, frameHead)
	if _, err := io.ReadFull(from, head); err != nil {
		return frame{}, err
	}
	length := int(head[0])<<16 | int(head[1])<<8 | int(head[2])
	raw := make([]byte, frameHead+length)
	copy(raw, head)
	if _, err := io.ReadFull(from, raw[frameHead:]); err != nil {
		return frame{}, err
	}
	return frame{kind: head[3], flags: head[4], raw: raw}, nil
}

func goAway(f frame) Result {
	event := Result{"event": "goaway"}
	if payload := f.payload(); len(payload) >= 8 {
		event["last_stream"] = binary.BigEndian.Uint32(payload)
		event["code"] = binary.BigEndian.Uint32(payload[4:])
		event["debug"] = string(payload[8:])
	}
	return event
}

// frameSender writes whole frames; its pings come between two of them, and never inside a list of headers.
type frameSender struct {
	mu   sync.Mutex
	to   io.Writer
	open bool // a list of headers goes on in the next frame
}

func (s *frameSender) raw(bytes []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, err := s.to.Write(bytes)
	return err
}

func (s *frameSender) pass(f frame) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f.kind == frameHeaders || f.kind == frameContinuation {
		s.open = f.flags&flagEndHeaders == 0
	}
	_, err := s.to.Write(f.raw)
	return err
}

// ping says whether there was a place for it.
func (s *frameSender) ping() (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open {
		return false, nil
	}
	_, err := s.to.Write(append([]byte{0, 0, byte(len(tapMark)), framePing, 0, 0, 0, 0, 0}, tapMark...))
	return true, err
}
