package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"sigs.k8s.io/apiserver-network-proxy/konnectivity-client/proto/client"
	"sigs.k8s.io/apiserver-network-proxy/proto/agent"
)

// tlsFlags name the certificates of a stub.
type tlsFlags struct{ ca, cert, key string }

func (t *tlsFlags) add(f *flag.FlagSet) {
	f.StringVar(&t.ca, "ca", "", "CA of the peer")
	f.StringVar(&t.cert, "cert", "", "own certificate")
	f.StringVar(&t.key, "key", "", "its key")
}

func (t *tlsFlags) load() (*tls.Config, *x509.CertPool, error) {
	pair, err := tls.LoadX509KeyPair(t.cert, t.key)
	if err != nil {
		return nil, nil, err
	}
	pem, err := os.ReadFile(t.ca)
	if err != nil {
		return nil, nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, nil, fmt.Errorf("no certificate in %s", t.ca)
	}
	return &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}, pool, nil
}

// stubLink is one Connect stream of the stub, on a connection of its own.
type stubLink struct {
	agent.AgentService_ConnectClient
	name string
	mu   sync.Mutex
	last atomic.Int64
}

func (l *stubLink) send(packet *client.Packet) {
	l.mu.Lock()
	defer l.mu.Unlock()
	_ = l.AgentService_ConnectClient.Send(packet)
}

type agentStubFlags struct {
	tlsFlags
	server, mode      string
	id, identifiers   string
	id2, identifiers2 string
	second            string
	size              int
}

// agentStub registers one or two agents and answers by mode. Its answers to DATA are echoes that carry the stub's own
// name, so a test sees which link a byte came through.
func agentStub(args []string) (Result, error) {
	var o agentStubFlags
	f := flag.NewFlagSet("agent-stub", flag.ExitOnError)
	o.add(f)
	f.StringVar(&o.server, "server", "", "host:port of the server's agent listener")
	f.StringVar(&o.mode, "mode", "echo", "echo, silent (never answers dials), forge-dial (the other link answers), forge-data (the other link sends into the tunnel), oversized (echoes too much), malformed, harmless, late-dial-cls")
	f.StringVar(&o.id, "id", "stub-a", "agent id of the first link")
	f.StringVar(&o.identifiers, "identifiers", "", "its identifiers")
	f.StringVar(&o.second, "second", "no", "no, start (a second link at once) or line (a second link when a line comes on stdin)")
	f.StringVar(&o.id2, "second-id", "stub-b", "agent id of the second link")
	f.StringVar(&o.identifiers2, "second-identifiers", "", "its identifiers")
	f.IntVar(&o.size, "size", 5<<20, "bytes of the oversized packet")
	_ = f.Parse(args) // ExitOnError
	return Result{}, o.run()
}

func (o *agentStubFlags) run() error {
	first, err := o.link("a", o.id, o.identifiers)
	if err != nil {
		return err
	}
	links := [2]*stubLink{first}
	if o.second == "start" {
		if links[1], err = o.link("b", o.id2, o.identifiers2); err != nil {
			return err
		}
	}
	go o.serve(links[0], links[1])
	if links[1] != nil {
		go o.serve(links[1], links[0])
	}
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		if o.second == "line" && links[1] == nil {
			if links[1], err = o.link("b", o.id2, o.identifiers2); err != nil {
				return err
			}
			go o.serve(links[1], nil)
		}
	}
	return nil
}

// link opens a connection, calls Connect and waits for the server's headers.
func (o *agentStubFlags) link(name, id, identifiers string) (*stubLink, error) {
	config, pool, err := o.load()
	if err != nil {
		return nil, err
	}
	config.RootCAs = pool
	conn, err := grpc.NewClient("passthrough:///"+o.server, grpc.WithTransportCredentials(credentials.NewTLS(config)))
	if err != nil {
		return nil, err
	}
	ctx := metadata.AppendToOutgoingContext(context.Background(), "agentid", id, "agentidentifiers", identifiers)
	stream, err := agent.NewAgentServiceClient(conn).Connect(ctx, grpc.MaxCallRecvMsgSize(8<<20))
	if err != nil {
		return nil, err
	}
	headers, err := stream.Header()
	if err != nil {
		return nil, err
	}
	if len(headers.Get("serverid")) != 1 || len(headers.Get("servercount")) != 1 {
		_, err := stream.Recv()
		return nil, errors.Join(fmt.Errorf("link %s: headers %v", name, headers), err)
	}
	emit(Result{"event": "linked", "link": name, "serverid": headers.Get("serverid")[0], "servercount": headers.Get("servercount")[0]})
	return &stubLink{AgentService_ConnectClient: stream, name: name}, nil
}

func (o *agentStubFlags) serve(link, other *stubLink) {
	if o.mode == "malformed" || o.mode == "harmless" {
		packets := harmless()
		if o.mode == "malformed" {
			packets = append(packets, malformed()...)
		}
		for _, packet := range packets {
			link.send(packet)
		}
		emit(Result{"event": "sent", "link": link.name})
	}
	for {
		packet, err := link.Recv()
		if err != nil {
			emit(Result{"event": "ended", "link": link.name, "error": err.Error()})
			return
		}
		event := view(packet)
		event["event"] = "packet"
		event["link"] = link.name
		emit(event)
		switch packet.Type {
		case client.PacketType_DIAL_REQ:
			o.answerDial(link, other, packet.GetDialRequest().GetRandom())
		case client.PacketType_DATA:
			o.answerData(link, packet.GetData())
		case client.PacketType_CLOSE_REQ:
			link.send(closeRsp(packet.GetCloseRequest().GetConnectID(), ""))
		}
	}
}

func (o *agentStubFlags) answerDial(link, other *stubLink, random int64) {
	switch {
	case o.mode == "silent":
	case o.mode == "forge-dial" && other != nil:
		other.send(dialRsp(random, 77, ""))
		time.AfterFunc(500*time.Millisecond, func() { link.send(dialRsp(random, 0, "refused by the agent that was asked")) })
	case o.mode == "late-dial-cls":
		connID := link.last.Add(1)
		link.send(dialRsp(random, connID, ""))
		link.send(&client.Packet{Type: client.PacketType_DIAL_CLS, Payload: &client.Packet_CloseDial{CloseDial: &client.CloseDial{Random: random}}})
	case o.mode == "forge-data" && other != nil:
		link.send(dialRsp(random, link.last.Add(1), ""))
		for connID := int64(1); connID <= 64; connID++ {
			other.send(dataPacket(connID, []byte("forged")))
			other.send(closeRsp(connID, "forged"))
		}
		emit(Result{"event": "forged", "link": other.name})
	default:
		link.send(dialRsp(random, link.last.Add(1), ""))
	}
}

func (o *agentStubFlags) answerData(link *stubLink, data *client.Data) {
	if o.mode == "oversized" {
		link.send(dataPacket(data.GetConnectID(), make([]byte, o.size)))
		return
	}
	answer := fmt.Appendf(nil, "%s%d:", link.name, data.GetConnectID())
	link.send(dataPacket(data.GetConnectID(), append(answer, data.GetData()...)))
}
