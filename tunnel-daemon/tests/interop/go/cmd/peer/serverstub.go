package main

import (
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"sigs.k8s.io/apiserver-network-proxy/konnectivity-client/proto/client"
	"sigs.k8s.io/apiserver-network-proxy/proto/agent"
)

type serverStubber struct {
	agent.UnimplementedAgentServiceServer
	tlsFlags
	mode, target string
	connects     atomic.Int64
}

// serverStub is an AgentService that greets wrongly, or greets well and then runs one script against the agent.
func serverStub(args []string) (Result, error) {
	var o serverStubber
	f := flag.NewFlagSet("server-stub", flag.ExitOnError)
	o.add(f)
	f.StringVar(&o.mode, "mode", "listen", "greetings: no-headers, no-serverid, two-serverids, bad-count, refuse; scripts: listen, dial-data, close-twice, data-unknown, break-after-dial, malformed, oversized, zero-count")
	f.StringVar(&o.target, "target", "", "host:port of an echo target for the scripts")
	alpn := f.String("alpn", "", "the only ALPN protocol spoken, empty = h2")
	_ = f.Parse(args) // ExitOnError

	config, pool, err := o.load()
	if err != nil {
		return nil, err
	}
	config.ClientCAs = pool
	config.ClientAuth = tls.RequireAndVerifyClientCert
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	emit(Result{"event": "listening", "port": listener.Addr().(*net.TCPAddr).Port})
	if *alpn != "" {
		config.NextProtos = []string{*alpn}
		go acceptALPN(tls.NewListener(listener, config))
	} else {
		server := grpc.NewServer(grpc.Creds(credentials.NewTLS(config)), grpc.MaxSendMsgSize(16<<20))
		agent.RegisterAgentServiceServer(server, &o)
		go func() { _ = server.Serve(listener) }()
	}
	<-stdinClosed()
	return Result{"connects": o.connects.Load()}, nil
}

// acceptALPN only shakes hands and says what was selected.
func acceptALPN(listener net.Listener) {
	for {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		go func() {
			defer conn.Close()
			err := conn.(*tls.Conn).Handshake()
			event := Result{"event": "handshake", "alpn": conn.(*tls.Conn).ConnectionState().NegotiatedProtocol}
			if err != nil {
				event["error"] = err.Error()
			}
			emit(event)
		}()
	}
}

// Connect is one agent's stream.
func (o *serverStubber) Connect(stream agent.AgentService_ConnectServer) error {
	connect := o.connects.Add(1)
	incoming, _ := metadata.FromIncomingContext(stream.Context())
	emit(Result{"event": "connect", "n": connect, "agentid": incoming.Get("agentid"),
		"agentidentifiers": incoming.Get("agentidentifiers"), "user_agent": incoming.Get("user-agent")})
	headers := metadata.Pairs("serverid", "stub", "servercount", "1")
	script := o.script()
	switch o.mode {
	case "no-headers":
		<-stream.Context().Done()
		emit(Result{"event": "gone", "n": connect})
		return stream.Context().Err()
	case "no-serverid":
		headers = metadata.Pairs("servercount", "1")
	case "two-serverids":
		headers = metadata.Pairs("serverid", "one", "serverid", "two", "servercount", "1")
	case "bad-count":
		headers = metadata.Pairs("serverid", "stub", "servercount", "several")
	case "zero-count":
		headers = metadata.Pairs("serverid", "stub", "servercount", "0")
	case "refuse":
		return errors.New("this server refuses everybody")
	}
	if err := stream.SendHeader(headers); err != nil {
		return err
	}
	in := startInbox(observed{stream})
	if err := script(stream, in); err != nil {
		emit(Result{"event": "script", "ok": false, "error": err.Error()})
		return err
	}
	emit(Result{"event": "script", "ok": true})
	if o.mode == "break-after-dial" {
		return errors.New("broken on purpose")
	}
	for range in.packets {
	}
	emit(Result{"event": "gone", "n": connect})
	return nil
}

// observed reports each packet as it is read.
type observed struct{ receiver }

func (o observed) Recv() (*client.Packet, error) {
	packet, err := o.receiver.Recv()
	if err == nil {
		event := view(packet)
		event["event"] = "packet"
		emit(event)
	}
	return packet, err
}

type script func(stream agent.AgentService_ConnectServer, in *inbox) error

func (o *serverStubber) script() script {
	switch o.mode {
	case "dial-data":
		return o.dialData
	case "close-twice":
		return o.closeTwice
	case "data-unknown":
		return dataUnknown
	case "break-after-dial":
		return o.dialOnly
	case "malformed":
		return o.malformed
	case "oversized":
		return o.oversized
	default:
		return func(agent.AgentService_ConnectServer, *inbox) error { return nil }
	}
}

const patience = 8 * time.Second

// dial wants a DIAL_RSP with the same random and a connID.
func (o *serverStubber) dial(stream agent.AgentService_ConnectServer, in *inbox) (int64, error) {
	if err := stream.Send(dialReq(4711, o.target)); err != nil {
		return 0, err
	}
	packet := in.next(patience)
	answer := packet.GetDialResponse()
	if answer == nil || answer.Random != 4711 || answer.Error != "" || answer.ConnectID == 0 {
		return 0, fmt.Errorf("in place of the DIAL_RSP: %v", packet)
	}
	return answer.ConnectID, nil
}

func (o *serverStubber) dialOnly(stream agent.AgentService_ConnectServer, in *inbox) error {
	_, err := o.dial(stream, in)
	return err
}

// dialData asks a source for five bytes, wants them as DATA, and then the CLOSE_RSP of the source's own close.
func (o *serverStubber) dialData(stream agent.AgentService_ConnectServer, in *inbox) error {
	connID, err := o.dial(stream, in)
	if err != nil {
		return err
	}
	if err := stream.Send(dataPacket(connID, []byte("5\n"))); err != nil {
		return err
	}
	got := 0
	for got < 5 {
		packet := in.next(patience)
		data := packet.GetData()
		if data == nil || data.ConnectID != connID || len(data.Data) == 0 {
			return fmt.Errorf("in place of DATA: %v", packet)
		}
		got += len(data.Data)
	}
	return wantClose(in, connID, "")
}

func wantClose(in *inbox, connID int64, text string) error {
	packet := in.next(patience)
	closed := packet.GetCloseResponse()
	if closed == nil || closed.ConnectID != connID || closed.Error != text {
		return fmt.Errorf("in place of CLOSE_RSP %d %q: %v", connID, text, packet)
	}
	return nil
}

func (o *serverStubber) closeTwice(stream agent.AgentService_ConnectServer, in *inbox) error {
	connID, err := o.dial(stream, in)
	if err != nil {
		return err
	}
	if err := stream.Send(closeReq(connID)); err != nil {
		return err
	}
	if err := wantClose(in, connID, ""); err != nil {
		return err
	}
	if err := stream.Send(closeReq(connID)); err != nil {
		return err
	}
	return wantClose(in, connID, "Unknown connectID")
}

func dataUnknown(stream agent.AgentService_ConnectServer, in *inbox) error {
	if err := stream.Send(dataPacket(4096, []byte("for nobody"))); err != nil {
		return err
	}
	return wantClose(in, 4096, "unrecognized connectID")
}

// malformed sends every bad packet, some of them for an open connection, and wants an echo to work all the same.
func (o *serverStubber) malformed(stream agent.AgentService_ConnectServer, in *inbox) error {
	for _, packet := range append(malformed(), harmless()...) {
		if err := stream.Send(packet); err != nil {
			return err
		}
	}
	// Bad packets may be answered (a DIAL_REQ without payload with an error, say); the honest dial comes after them.
	if err := stream.Send(dialReq(4711, o.target)); err != nil {
		return err
	}
	connID := int64(0)
	for connID == 0 {
		packet := in.next(patience)
		if packet == nil {
			return fmt.Errorf("no answer to the dial behind the bad packets (stream: %s %s)", in.code, in.text)
		}
		if answer := packet.GetDialResponse(); answer.GetRandom() == 4711 {
			connID = answer.ConnectID
		}
	}
	return o.echo(stream, in, connID)
}

func (o *serverStubber) echo(stream agent.AgentService_ConnectServer, in *inbox, connID int64) error {
	if err := stream.Send(dataPacket(connID, []byte("echo"))); err != nil {
		return err
	}
	if packet := in.next(patience); string(packet.GetData().GetData()) != "echo" {
		return fmt.Errorf("in place of the echo: %v", packet)
	}
	return nil
}

// oversized hurts one connection with a message over the limit and wants another one to live on, or the agent to come back.
func (o *serverStubber) oversized(stream agent.AgentService_ConnectServer, in *inbox) error {
	connID, err := o.dial(stream, in)
	if err != nil {
		return err
	}
	if o.connects.Load() > 1 {
		return o.echo(stream, in, connID)
	}
	return stream.Send(dataPacket(connID, make([]byte, 5<<20)))
}
