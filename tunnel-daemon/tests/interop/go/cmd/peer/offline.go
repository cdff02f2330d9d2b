package main

import (
	"errors"
	"net"
	"os"
	"os/exec"
)

// runOffline runs a program beside a name server, at the usual port, that knows no name. It is for a network namespace
// of its own: what the program says about an unknown name must not depend on what the DNS of this host is like.
func runOffline(args []string) (Result, error) {
	if len(args) == 0 {
		return nil, errors.New("offline needs a program to run")
	}
	server, err := net.ListenPacket("udp", "127.0.0.1:53")
	if err != nil {
		return nil, err
	}
	go knowNothing(server)
	program := exec.Command(args[0], args[1:]...)
	program.Stdin, program.Stdout, program.Stderr = os.Stdin, os.Stdout, os.Stderr
	return nil, program.Run()
}

func knowNothing(server net.PacketConn) {
	buffer := make([]byte, 4096)
	for {
		n, from, err := server.ReadFrom(buffer)
		if err != nil {
			return
		}
		if answer := noSuchName(buffer[:n]); answer != nil {
			_, _ = server.WriteTo(answer, from)
		}
	}
}

// noSuchName turns a DNS query into its answer: the header, the question, and the code for a name that does not exist
// (RFC 1035, section 4.1). Nil when it is no query with one question.
func noSuchName(query []byte) []byte {
	const header, typeAndClass = 12, 4
	if len(query) < header || query[4] != 0 || query[5] != 1 {
		return nil
	}
	end := header
	for end < len(query) && query[end] != 0 {
		end += int(query[end]) + 1
	}
	end += 1 + typeAndClass
	if end > len(query) {
		return nil
	}
	answer := append([]byte(nil), query[:end]...)
	answer[2] |= 0x80 // a response
	answer[3] = 0x83  // recursion available, no such name
	clear(answer[6:header])
	return answer
}
