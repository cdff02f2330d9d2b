package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"adit.invalid/interop/tunnel"
)

const messageBytes = 64

// open dials with a limit that no healthy server reaches.
func (l *load) open(address string) (*tunnel.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	return l.dialer.Dial(ctx, address)
}

// openAll opens one tunnel after the other.
func (l *load) openAll(address string, count int) ([]*tunnel.Conn, error) {
	var conns []*tunnel.Conn
	for number := range count {
		conn, err := l.open(address)
		if err != nil {
			return nil, fmt.Errorf("opening tunnel %d: %w", number+1, err)
		}
		conns = append(conns, conn)
	}
	return conns, nil
}

// together runs work count times at once.
func together[T any](count int, work func(at int) (T, error)) ([]T, error) {
	results, failures := make([]T, count), make([]error, count)
	var group sync.WaitGroup
	for at := range count {
		group.Go(func() { results[at], failures[at] = work(at) })
	}
	group.Wait()
	return results, errors.Join(failures...)
}

// message is a question like no other of its connection.
func message(number uint64) []byte {
	m := make([]byte, messageBytes)
	binary.BigEndian.PutUint64(m, number)
	return m
}

// readAnswer fails when the answer is to another question.
func readAnswer(conn io.Reader, buffer []byte, number uint64) error {
	if _, err := io.ReadFull(conn, buffer); err != nil {
		return err
	}
	if binary.BigEndian.Uint64(buffer) != number {
		return errors.New("the answer is to another question")
	}
	return nil
}

func roundTrip(conn io.ReadWriter, number uint64) error {
	if _, err := conn.Write(message(number)); err != nil {
		return err
	}
	return readAnswer(conn, make([]byte, messageBytes), number)
}

// warmUp does round trips that are not measured.
func warmUp(conns []*tunnel.Conn) error {
	for _, conn := range conns {
		for number := range uint64(20) {
			if err := roundTrip(conn, number); err != nil {
				return err
			}
		}
	}
	return nil
}

// until tells whether another operation is due after so many.
type until func(done int) bool

func untilTime(end time.Time) until {
	return func(int) bool { return time.Now().Before(end) }
}

func untilCount(count int) until {
	return func(done int) bool { return done < count }
}

// echoes measures round trips of 64 bytes, closed loop.
func (l *load) echoes() error {
	for _, connections := range l.plan.Connections {
		name := fmt.Sprintf("echo_%d", connections)
		cpu, err := l.processes.cpuSeconds()
		if err != nil {
			return err
		}
		samples, err := l.closedLoop(connections, l.plan.lasting())
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if err := l.rate(name, len(samples), l.plan.lasting(), cpu); err != nil {
			return err
		}
		if err := l.latencies(name, samples); err != nil {
			return err
		}
	}
	return nil
}

// closedLoop opens all connections first; then all ask for as long as told, each again once it has its answer.
func (l *load) closedLoop(connections int, lasting time.Duration) ([]time.Duration, error) {
	conns, err := l.openAll(l.targets.Echo, connections)
	if err != nil {
		return nil, err
	}
	if err := warmUp(conns); err != nil {
		return nil, err
	}
	return askAll(conns, untilTime(time.Now().Add(lasting)))
}

// askAll asks on each connection, and closes it.
func askAll(conns []*tunnel.Conn, goesOn until) ([]time.Duration, error) {
	all, err := together(len(conns), func(at int) ([]time.Duration, error) {
		// The library may call the close of a tunnel an error.
		defer conns[at].Close()
		var times []time.Duration
		for goesOn(len(times)) {
			begin := time.Now()
			if err := roundTrip(conns[at], uint64(len(times))); err != nil {
				return nil, err
			}
			times = append(times, time.Since(begin))
		}
		return times, nil
	})
	return slices.Concat(all...), err
}

// dials measures dial, one round trip and close.
func (l *load) dials() error {
	for _, workers := range l.plan.Dialers {
		name := fmt.Sprintf("dials_%d", workers)
		cpu, err := l.processes.cpuSeconds()
		if err != nil {
			return err
		}
		begin := time.Now()
		all, err := together(workers, func(int) ([]time.Duration, error) {
			return l.dial(untilTime(begin.Add(l.plan.lasting())))
		})
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		samples := slices.Concat(all...)
		if err := l.rate(name, len(samples), time.Since(begin), cpu); err != nil {
			return err
		}
		if err := l.latencies(name, samples); err != nil {
			return err
		}
	}
	return nil
}

func (l *load) dial(goesOn until) ([]time.Duration, error) {
	var times []time.Duration
	for goesOn(len(times)) {
		begin := time.Now()
		conn, err := l.open(l.targets.Echo)
		if err != nil {
			return nil, err
		}
		if err := roundTrip(conn, uint64(len(times))); err != nil {
			return nil, err
		}
		times = append(times, time.Since(begin))
		_ = conn.Close()
	}
	return times, nil
}
