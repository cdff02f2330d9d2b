package main

import (
	"encoding/binary"
	"io"
	"net"

	"golang.org/x/net/dns/dnsmessage"
)

// guestName is what the cluster's DNS knows besides Services, for which nobody asks it here.
const guestName = "app.guest.example."

// names answers DNS over TCP: guestName has one address, and no other name exists.
func names(listener net.Listener, address net.IP) error {
	for {
		connection, err := listener.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer connection.Close()
			for answer(connection, address) == nil {
			}
		}()
	}
}

func answer(connection net.Conn, address net.IP) error {
	var length uint16
	if err := binary.Read(connection, binary.BigEndian, &length); err != nil {
		return err
	}
	asked := make([]byte, length)
	if _, err := io.ReadFull(connection, asked); err != nil {
		return err
	}
	var message dnsmessage.Message
	if err := message.Unpack(asked); err != nil {
		return err
	}
	message.Response, message.Additionals = true, nil
	question := message.Questions[0]
	switch {
	case question.Name.String() != guestName:
		message.RCode = dnsmessage.RCodeNameError
	case question.Type == dnsmessage.TypeA:
		header := dnsmessage.ResourceHeader{Name: question.Name, Class: question.Class, TTL: 30}
		message.Answers = []dnsmessage.Resource{{Header: header, Body: &dnsmessage.AResource{A: [4]byte(address.To4())}}}
	}
	packed, err := message.Pack()
	if err != nil {
		return err
	}
	_, err = connection.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(packed))), packed...))
	return err
}
