package main

import (
	"fmt"
	"io"
	"time"
)

const mib = 1 << 20

// count does a fixed number of operations, whatever time they take: for who counts beside us what each of them costs.
func (l *load) count() error {
	var err error
	c := l.plan.Counted
	switch c.Operation {
	case "echo":
		err = l.countEchoes(c.Connections, c.Times)
	case "dial":
		_, err = l.dial(untilCount(c.Times))
	case "down":
		err = l.countDown(int64(c.Times) * mib)
	case "up":
		err = l.countUp(int64(c.Times) * mib)
	default:
		err = fmt.Errorf("the plan does not say what: there is no operation %q", c.Operation)
	}
	if err != nil {
		return err
	}
	l.values["counted_times"] = float64(c.Times)
	return nil
}

func (l *load) countEchoes(connections, times int) error {
	if connections < 1 || times%connections != 0 {
		return fmt.Errorf("%d echoes cannot be shared by %d connections", times, connections)
	}
	conns, err := l.openAll(l.targets.Echo, connections)
	if err == nil {
		_, err = askAll(conns, untilCount(times/connections))
	}
	return err
}

// countDown reads all that the source was asked for: nothing is on its way then.
func (l *load) countDown(bytes int64) error {
	conn, err := l.open(l.targets.Source)
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintln(conn, bytes); err != nil {
		return err
	}
	buffer := make([]byte, 256<<10)
	for moved := int64(0); moved < bytes; {
		n, err := conn.Read(buffer)
		moved += int64(n)
		if err != nil && moved < bytes {
			return fmt.Errorf("%d of %d bytes arrived: %w", moved, bytes, err)
		}
	}
	_ = conn.Close()
	return nil
}

// countUp closes when all has come to the sink: what is on its way would go with the tunnel.
func (l *load) countUp(bytes int64) error {
	ask, done, err := l.askSink()
	if err != nil {
		return err
	}
	defer done()
	before, err := ask()
	if err != nil {
		return err
	}
	conn, err := l.open(l.targets.Sink)
	if err != nil {
		return err
	}
	if _, err := io.WriteString(conn, "load -1\n"); err != nil {
		return err
	}
	buffer := make([]byte, 32<<10)
	for sent := int64(0); sent < bytes; sent += int64(len(buffer)) {
		if _, err := conn.Write(buffer); err != nil {
			return err
		}
	}
	// A sink that never has it all is a failure, not a run that hangs.
	limit := time.Now().Add(time.Minute)
	for {
		now, err := ask()
		if err != nil {
			return err
		}
		if now-before >= bytes {
			break
		}
		if time.Now().After(limit) {
			return fmt.Errorf("%d of %d bytes arrived within a minute", now-before, bytes)
		}
		time.Sleep(5 * time.Millisecond)
	}
	_ = conn.Close()
	return nil
}
