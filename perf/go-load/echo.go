package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
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

// warmUp is the number of round trips of a connection that are not measured.
const warmUp = 20

// echoes measures round trips of 64 bytes, closed loop.
func (l *load) echoes() error {
	for _, connections := range l.plan.Connections {
		name := fmt.Sprintf("echo_%d", connections)
		before, err := l.processes.cpuSeconds()
		if err != nil {
			return err
		}
		samples, err := l.closedLoop(connections, l.plan.lasting())
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		after, err := l.processes.cpuSeconds()
		if err != nil {
			return err
		}
		if len(l.processes) > 0 && len(samples) > 0 {
			l.outcome.Values[name+"_cpu_us"] = (after - before) * 1e6 / float64(len(samples))
		}
		l.outcome.Values[name+"_per_s"] = float64(len(samples)) / l.plan.Seconds
		if err := l.outcome.latencies(name, samples); err != nil {
			return err
		}
	}
	return nil
}

// closedLoop opens all connections first; then all ask for as long as told, each again once it has its answer.
func (l *load) closedLoop(connections int, lasting time.Duration) ([]time.Duration, error) {
	var conns []*tunnel.Conn
	for range connections {
		conn, err := l.open(l.targets.Echo)
		if err != nil {
			return nil, err
		}
		conns = append(conns, conn)
		for number := range uint64(warmUp) {
			if err := roundTrip(conn, number); err != nil {
				return nil, err
			}
		}
	}
	return askAll(conns, lasting)
}

// askAll asks on all connections for as long as told, and closes them.
func askAll(conns []*tunnel.Conn, lasting time.Duration) ([]time.Duration, error) {
	var mu sync.Mutex
	var all []time.Duration
	var failed error
	var group sync.WaitGroup
	end := time.Now().Add(lasting)
	for _, conn := range conns {
		group.Go(func() {
			times, err := askUntil(conn, end, warmUp)
			// The library may call the close of a tunnel an error.
			_ = conn.Close()
			mu.Lock()
			defer mu.Unlock()
			all = append(all, times...)
			failed = errors.Join(failed, err)
		})
	}
	group.Wait()
	return all, failed
}

func askUntil(conn io.ReadWriter, end time.Time, number uint64) ([]time.Duration, error) {
	var times []time.Duration
	for ; ; number++ {
		begin := time.Now()
		if !begin.Before(end) {
			return times, nil
		}
		if err := roundTrip(conn, number); err != nil {
			return nil, err
		}
		times = append(times, time.Since(begin))
	}
}

// dials measures dial, one round trip and close.
func (l *load) dials() error {
	for _, workers := range l.plan.Dialers {
		name := fmt.Sprintf("dials_%d", workers)
		cpu, err := l.processes.cpuSeconds()
		if err != nil {
			return err
		}
		var mu sync.Mutex
		var all []time.Duration
		var failed error
		var group sync.WaitGroup
		begin := time.Now()
		for range workers {
			group.Go(func() {
				times, err := l.dialUntil(begin.Add(l.plan.lasting()))
				mu.Lock()
				defer mu.Unlock()
				all = append(all, times...)
				failed = errors.Join(failed, err)
			})
		}
		group.Wait()
		took := time.Since(begin)
		if failed != nil {
			return fmt.Errorf("%s: %w", name, failed)
		}
		l.outcome.Values[name+"_per_s"] = float64(len(all)) / took.Seconds()
		after, err := l.processes.cpuSeconds()
		if err != nil {
			return err
		}
		if len(l.processes) > 0 && len(all) > 0 {
			l.outcome.Values[name+"_cpu_us"] = (after - cpu) * 1e6 / float64(len(all))
		}
		if err := l.outcome.latencies(name, all); err != nil {
			return err
		}
	}
	return nil
}

func (l *load) dialUntil(end time.Time) ([]time.Duration, error) {
	var times []time.Duration
	for {
		begin := time.Now()
		if !begin.Before(end) {
			return times, nil
		}
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
}
