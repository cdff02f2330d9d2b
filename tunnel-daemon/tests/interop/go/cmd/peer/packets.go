package main

import (
	"io"
	"time"

	"google.golang.org/grpc/status"
	"sigs.k8s.io/apiserver-network-proxy/konnectivity-client/proto/client"
)

// Packets by hand: the helpers below also make those that the upstream library never would.

func dialReq(random int64, address string) *client.Packet {
	return &client.Packet{Type: client.PacketType_DIAL_REQ, Payload: &client.Packet_DialRequest{
		DialRequest: &client.DialRequest{Protocol: "tcp", Address: address, Random: random},
	}}
}

func dialRsp(random, connID int64, failure string) *client.Packet {
	return &client.Packet{Type: client.PacketType_DIAL_RSP, Payload: &client.Packet_DialResponse{
		DialResponse: &client.DialResponse{Random: random, ConnectID: connID, Error: failure},
	}}
}

func dataPacket(connID int64, data []byte) *client.Packet {
	return &client.Packet{Type: client.PacketType_DATA, Payload: &client.Packet_Data{
		Data: &client.Data{ConnectID: connID, Data: data},
	}}
}

func closeReq(connID int64) *client.Packet {
	return &client.Packet{Type: client.PacketType_CLOSE_REQ, Payload: &client.Packet_CloseRequest{
		CloseRequest: &client.CloseRequest{ConnectID: connID},
	}}
}

func closeRsp(connID int64, failure string) *client.Packet {
	return &client.Packet{Type: client.PacketType_CLOSE_RSP, Payload: &client.Packet_CloseResponse{
		CloseResponse: &client.CloseResponse{ConnectID: connID, Error: failure},
	}}
}

// malformed are packets that break rule W1 or W7: payload and type do not match, or the type is unknown.
func malformed() []*client.Packet {
	return []*client.Packet{
		{}, // an empty message reads as a DIAL_REQ without payload
		{Type: client.PacketType_DATA},
		{Type: client.PacketType_DIAL_RSP},
		{Type: client.PacketType_CLOSE_REQ},
		{Type: client.PacketType_CLOSE_RSP},
		{Type: client.PacketType_DIAL_CLS},
		{Type: client.PacketType_DATA, Payload: dialReq(1, "127.0.0.1:1").Payload},
		{Type: client.PacketType_DIAL_RSP, Payload: closeReq(1).Payload},
		{Type: client.PacketType_CLOSE_REQ, Payload: dataPacket(1, []byte("x")).Payload},
		{Type: client.PacketType(99), Payload: dataPacket(1, []byte("x")).Payload},
	}
}

// harmless are packets that every upstream party drops without a word.
func harmless() []*client.Packet {
	return []*client.Packet{
		dataPacket(0, []byte("to nobody")),
		{Type: client.PacketType(99)},
		{Type: client.PacketType(-1)},
	}
}

// view is a packet as the tests see it.
func view(packet *client.Packet) Result {
	seen := Result{"type": packet.Type.String()}
	switch payload := packet.Payload.(type) {
	case *client.Packet_DialRequest:
		seen["random"] = payload.DialRequest.Random
		seen["address"] = payload.DialRequest.Address
		seen["protocol"] = payload.DialRequest.Protocol
	case *client.Packet_DialResponse:
		seen["random"] = payload.DialResponse.Random
		seen["conn_id"] = payload.DialResponse.ConnectID
		seen["error"] = payload.DialResponse.Error
	case *client.Packet_Data:
		seen["conn_id"] = payload.Data.ConnectID
		seen["length"] = len(payload.Data.Data)
		seen["data"] = string(payload.Data.Data[:min(len(payload.Data.Data), 64)])
	case *client.Packet_CloseRequest:
		seen["conn_id"] = payload.CloseRequest.ConnectID
	case *client.Packet_CloseResponse:
		seen["conn_id"] = payload.CloseResponse.ConnectID
		seen["error"] = payload.CloseResponse.Error
	case *client.Packet_CloseDial:
		seen["random"] = payload.CloseDial.Random
	}
	return seen
}

// receiver is the part of a gRPC stream that both services share.
type receiver interface {
	Recv() (*client.Packet, error)
}

// inbox reads a stream in the background, so that waiting for a packet can have a limit.
type inbox struct {
	packets chan *client.Packet
	// code is the gRPC status of the stream, readable once packets is closed.
	code string
	text string
}

func startInbox(stream receiver) *inbox {
	in := &inbox{packets: make(chan *client.Packet, 1024)}
	go func() {
		defer close(in.packets)
		for {
			packet, err := stream.Recv()
			if err == io.EOF {
				in.code = "OK"
				return
			}
			if err != nil {
				in.code = status.Code(err).String()
				in.text = err.Error()
				return
			}
			in.packets <- packet
		}
	}()
	return in
}

// next waits for one packet; nil means none came in time or the stream ended.
func (in *inbox) next(within time.Duration) *client.Packet {
	select {
	case packet := <-in.packets:
		return packet
	case <-time.After(within):
		return nil
	}
}

// rest collects packets until none comes for a while or the stream ends; says whether it ended.
func (in *inbox) rest(quiet time.Duration) (seen []Result, ended bool) {
	seen = []Result{}
	for {
		select {
		case packet, open := <-in.packets:
			if !open {
				return seen, true
			}
			seen = append(seen, view(packet))
		case <-time.After(quiet):
			return seen, false
		}
	}
}
