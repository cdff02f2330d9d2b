package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"sigs.k8s.io/apiserver-network-proxy/konnectivity-client/proto/client"
)

// rawStream is one Proxy call and what it needs around it.
type rawStream struct {
	client.ProxyService_ProxyClient
	in     *inbox
	cancel context.CancelFunc
}

func (f *clientFlags) connect() (*grpc.ClientConn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), f.timeout)
	defer cancel()
	return grpc.DialContext(ctx, f.dialer.Socket, f.dialer.Options()...) //nolint:staticcheck // as the library does
}

func openRaw(conn *grpc.ClientConn) (*rawStream, error) {
	ctx, cancel := context.WithCancel(context.Background())
	stream, err := client.NewProxyServiceClient(conn).Proxy(ctx, grpc.MaxCallRecvMsgSize(8<<20))
	if err != nil {
		cancel()
		return nil, err
	}
	return &rawStream{ProxyService_ProxyClient: stream, in: startInbox(stream), cancel: cancel}, nil
}

// dial does an honest dial and returns the connID.
func (s *rawStream) dial(address string, within time.Duration) (int64, error) {
	random := rand.Int64()
	if err := s.Send(dialReq(random, address)); err != nil {
		return 0, err
	}
	packet := s.in.next(within)
	if packet == nil {
		return 0, fmt.Errorf("no DIAL_RSP within %s (stream: %s %s)", within, s.in.code, s.in.text)
	}
	answer := packet.GetDialResponse()
	if packet.Type != client.PacketType_DIAL_RSP || answer.GetRandom() != random {
		return 0, fmt.Errorf("not the DIAL_RSP of this dial: %v", view(packet))
	}
	if answer.Error != "" {
		return 0, errors.New(answer.Error)
	}
	return answer.ConnectID, nil
}

// echo sends a message and wants it back, in however many packets.
func (s *rawStream) echo(connID int64, message []byte, within time.Duration) error {
	if err := s.Send(dataPacket(connID, message)); err != nil {
		return err
	}
	var got []byte
	for len(got) < len(message) {
		packet := s.in.next(within)
		if packet == nil {
			return fmt.Errorf("%d of %d bytes came back (stream: %s %s)", len(got), len(message), s.in.code, s.in.text)
		}
		data := packet.GetData()
		if data == nil || data.ConnectID != connID || len(data.Data) == 0 {
			return fmt.Errorf("in place of echoed data: %v", view(packet))
		}
		got = append(got, data.Data...)
	}
	if !bytes.Equal(got, message) {
		return errors.New("other bytes came back")
	}
	return nil
}

type misbehaviour struct {
	help string
	// run returns an error when the server did not do what an honest client next to it may expect.
	run func(f *clientFlags, s *rawStream) error
}

func misbehaviours() map[string]misbehaviour {
	return map[string]misbehaviour{
		"malformed":         {"empty and mismatched packets, without a dial", sendMalformed},
		"malformed-later":   {"the same behind an honest dial", dialThen(sendMalformed)},
		"harmless":          {"connID 0 and unknown types, then an honest echo", harmlessThenEcho},
		"data-before-dial":  {"DATA on a fresh stream", send(dataPacket(5, []byte("early")))},
		"close-before-dial": {"CLOSE_REQ on a fresh stream", send(closeReq(5))},
		"dial-cls-unknown":  {"DIAL_CLS of a dial nobody made", send(&client.Packet{Type: client.PacketType_DIAL_CLS, Payload: &client.Packet_CloseDial{CloseDial: &client.CloseDial{Random: 7}}})},
		"second-conn":       {"DATA for another connID behind an open one", secondConn},
		"foreign-conn":      {"DATA and CLOSE_REQ for connIDs 1..64 that belong to others", foreignConn},
		"oversized":         {"a DATA message over the limit", oversized},
		"largest":           {"a DATA message of exactly 4 MiB, echoed", largest},
		"unanswered":        {"DIAL_REQ; after a line on stdin DATA and CLOSE_REQ without an answer, then the stream ends", unanswered},
		"data-after-close":  {"many DATA behind CLOSE_REQ", dataAfterClose},
		"empty-data":        {"DATA without bytes, then an honest echo", emptyData},
		"tagged":            {"two seconds of talk with a stub agent, whose answers must all come from the same link", tagged},
		"tiny":              {"10,000 messages of one byte in one burst, echoed", tinyBurst},
	}
}

func wrong(args []string) (Result, error) {
	f := newClientFlags("wrong")
	kind := f.String("kind", "", "which misbehaviour")
	f.parse(args)
	chosen, known := misbehaviours()[*kind]
	if !known {
		return nil, fmt.Errorf("unknown --kind %q", *kind)
	}
	conn, err := f.connect()
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	stream, err := openRaw(conn)
	if err != nil {
		return nil, err
	}
	err = chosen.run(f, stream)
	seen, ended := stream.in.rest(700 * time.Millisecond)
	if !ended {
		_ = stream.CloseSend()
		var more []Result
		more, ended = stream.in.rest(2 * time.Second)
		seen = append(seen, more...)
	}
	result := Result{"packets": seen, "ended": ended}
	if ended {
		result["code"] = stream.in.code
		result["text"] = stream.in.text
	}
	return result, err
}

func send(packet *client.Packet) func(*clientFlags, *rawStream) error {
	return func(_ *clientFlags, s *rawStream) error { return s.Send(packet) }
}

func dialThen(next func(*clientFlags, *rawStream) error) func(*clientFlags, *rawStream) error {
	return func(f *clientFlags, s *rawStream) error {
		if _, err := s.dial(f.target, f.timeout); err != nil {
			return err
		}
		return next(f, s)
	}
}

// sendMalformed cannot fail: whether the server ends the stream is its business.
func sendMalformed(_ *clientFlags, s *rawStream) error {
	for _, packet := range malformed() {
		_ = s.Send(packet)
	}
	return nil
}

func harmlessThenEcho(f *clientFlags, s *rawStream) error {
	for _, packet := range harmless() {
		// Before a dial DATA is answered with CLOSE_RSP, even for connID 0.
		if packet.Type == client.PacketType_DATA {
			continue
		}
		if err := s.Send(packet); err != nil {
			return err
		}
	}
	connID, err := s.dial(f.target, f.timeout)
	if err != nil {
		return err
	}
	for _, packet := range harmless() {
		if err := s.Send(packet); err != nil {
			return err
		}
	}
	return s.echo(connID, []byte("still here"), f.timeout)
}

func secondConn(f *clientFlags, s *rawStream) error {
	connID, err := s.dial(f.target, f.timeout)
	if err != nil {
		return err
	}
	if err := s.echo(connID, []byte("first"), f.timeout); err != nil {
		return err
	}
	return s.Send(dataPacket(connID+1000, []byte("second")))
}

func foreignConn(f *clientFlags, s *rawStream) error {
	connID, err := s.dial(f.target, f.timeout)
	if err != nil {
		return err
	}
	for id := int64(1); id <= 64; id++ {
		if id == connID {
			continue
		}
		_ = s.Send(dataPacket(id, []byte("forged")))
		_ = s.Send(closeReq(id))
	}
	return nil
}

func oversized(f *clientFlags, s *rawStream) error {
	connID, err := s.dial(f.target, f.timeout)
	if err != nil {
		return err
	}
	_ = s.Send(dataPacket(connID, make([]byte, 4<<20+1)))
	return nil
}

// largest is the biggest message that fits the limit of 4 MiB, head included.
func largest(f *clientFlags, s *rawStream) error {
	connID, err := s.dial(f.target, f.timeout)
	if err != nil {
		return err
	}
	return s.echo(connID, bytes.Repeat([]byte("0123456789abcdef"), (4<<20-64)/16), f.timeout)
}

func unanswered(f *clientFlags, s *rawStream) error {
	if err := s.Send(dialReq(4242, f.target)); err != nil {
		return err
	}
	if !bufio.NewScanner(os.Stdin).Scan() {
		return errors.New("stdin ended before the line")
	}
	return errors.Join(
		s.Send(dataPacket(1, []byte("hello"))),
		s.Send(closeReq(1)),
	)
}

func dataAfterClose(f *clientFlags, s *rawStream) error {
	connID, err := s.dial(f.target, f.timeout)
	if err != nil {
		return err
	}
	if err := s.Send(closeReq(connID)); err != nil {
		return err
	}
	for range 200 {
		if err := s.Send(dataPacket(connID, []byte("too late"))); err != nil {
			return err
		}
	}
	return nil
}

func emptyData(f *clientFlags, s *rawStream) error {
	connID, err := s.dial(f.target, f.timeout)
	if err != nil {
		return err
	}
	for range 3 {
		if err := s.Send(dataPacket(connID, nil)); err != nil {
			return err
		}
	}
	return s.echo(connID, []byte("after nothing"), f.timeout)
}

// tagged talks to a stub agent, which puts its link and connID in front of each echo, and wants the same ones each time.
func tagged(f *clientFlags, s *rawStream) error {
	connID, err := s.dial(f.target, f.timeout)
	if err != nil {
		return err
	}
	first := ""
	for n := range 200 {
		message := fmt.Sprintf("message %d", n)
		if err := s.Send(dataPacket(connID, []byte(message))); err != nil {
			return err
		}
		packet := s.in.next(f.timeout)
		tag, rest, _ := strings.Cut(string(packet.GetData().GetData()), ":")
		if first == "" {
			first = tag
			emit(Result{"event": "tag", "tag": tag})
		}
		if tag != first || rest != message {
			return fmt.Errorf("message %d of the tunnel that began at %q came back as %v", n, first, packet)
		}
		time.Sleep(10 * time.Millisecond)
	}
	return s.Send(closeReq(connID))
}

func tinyBurst(f *clientFlags, s *rawStream) error {
	connID, err := s.dial(f.target, f.timeout)
	if err != nil {
		return err
	}
	const count = 10_000
	go func() {
		for n := range count {
			if s.Send(dataPacket(connID, []byte{byte(n)})) != nil {
				return
			}
		}
	}()
	for got := 0; got < count; {
		packet := s.in.next(f.timeout)
		data := packet.GetData()
		if data == nil || len(data.Data) == 0 {
			return fmt.Errorf("after %d bytes: %v", got, packet)
		}
		for _, b := range data.Data {
			if b != byte(got) {
				return fmt.Errorf("byte %d is %d", got, b)
			}
			got++
		}
	}
	return nil
}

// manyStreams opens many Proxy streams on one HTTP/2 connection, keeps all open, and echoes through each.
func manyStreams(args []string) (Result, error) {
	f := newClientFlags("many-streams")
	count := f.Int("streams", 1000, "Proxy streams on one connection")
	unread := f.Int("unread", 0, "further streams that ask a source for endless data and never read it")
	source := f.String("source", "", "host:port of the source for --unread")
	f.parse(args)
	conn, err := f.connect()
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	for range *unread {
		if err := leaveUnread(conn, *source); err != nil {
			return nil, fmt.Errorf("opening an unread stream: %w", err)
		}
	}
	failures := make([]error, *count)
	var dialled, echoed sync.WaitGroup
	dialled.Add(*count)
	for n := range *count {
		echoed.Go(func() {
			stream, err := openRaw(conn)
			var connID int64
			if err == nil {
				connID, err = stream.dial(f.target, f.timeout)
			}
			dialled.Done()
			dialled.Wait() // all are open at once before the first byte
			if err == nil {
				err = stream.echo(connID, fmt.Appendf(nil, "stream %d", n), f.timeout)
			}
			if err == nil {
				err = stream.Send(closeReq(connID))
			}
			failures[n] = err
		})
	}
	echoed.Wait()
	good := 0
	for _, err := range failures {
		if err == nil {
			good++
		}
	}
	return Result{"good": good, "streams": *count}, firstOf(failures)
}

func leaveUnread(conn *grpc.ClientConn, source string) error {
	stream, err := client.NewProxyServiceClient(conn).Proxy(context.Background())
	if err != nil {
		return err
	}
	random := rand.Int64()
	if err := stream.Send(dialReq(random, source)); err != nil {
		return err
	}
	packet, err := stream.Recv()
	if err != nil {
		return err
	}
	return stream.Send(dataPacket(packet.GetDialResponse().GetConnectID(), []byte("0\n")))
}

func firstOf(failures []error) error {
	for _, err := range failures {
		if err != nil {
			return err
		}
	}
	return nil
}
