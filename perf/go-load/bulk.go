package main

import (
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"time"
)

// transfers are running streams of one direction.
type transfers struct {
	stop     chan struct{}
	failures chan error
	streams  int
	// bytes that arrived so far, told by whoever receives them.
	bytes func() (int64, error)
	done  func()
}

// start opens all tunnels, then lets them run; a download gets rate bytes a second, or as many as it takes for 0.
func (l *load) start(up bool, streams int, rate int64) (*transfers, error) {
	address, greeting := l.targets.Source, "0\n"
	if rate > 0 {
		greeting = fmt.Sprintf("0 %d\n", rate)
	}
	if up {
		address, greeting = l.targets.Sink, "load -1\n"
	}
	conns, err := l.openAll(address, streams)
	if err != nil {
		return nil, err
	}
	moved := &atomic.Int64{}
	t := &transfers{
		stop: make(chan struct{}), failures: make(chan error, streams), streams: streams,
		bytes: func() (int64, error) { return moved.Load(), nil }, done: func() {},
	}
	if up {
		if t.bytes, t.done, err = l.askSink(); err != nil {
			return nil, err
		}
	}
	for _, conn := range conns {
		if _, err := io.WriteString(conn, greeting); err != nil {
			return nil, err
		}
		go func() {
			if up {
				t.failures <- t.upload(conn)
			} else {
				t.failures <- t.download(conn, moved)
			}
		}()
		go func() {
			<-t.stop
			_ = conn.Close()
		}()
	}
	return t, nil
}

func (t *transfers) stopped() bool {
	select {
	case <-t.stop:
		return true
	default:
		return false
	}
}

func (t *transfers) download(conn io.Reader, moved *atomic.Int64) error {
	buffer := make([]byte, 256<<10)
	for !t.stopped() {
		n, err := conn.Read(buffer)
		moved.Add(int64(n))
		if err != nil && !t.stopped() {
			return err
		}
	}
	return nil
}

func (t *transfers) upload(conn io.Writer) error {
	buffer := make([]byte, 32<<10)
	for !t.stopped() {
		if _, err := conn.Write(buffer); err != nil && !t.stopped() {
			return err
		}
	}
	return nil
}

// end closes the tunnels, an expected error for their transfers, and reports what failed before. A transfer the library
// does not let go is left alone after 1 s.
func (t *transfers) end() error {
	close(t.stop)
	defer t.done()
	limit := time.After(time.Second)
	var failed error
	for range t.streams {
		select {
		case err := <-t.failures:
			failed = errors.Join(failed, err)
		case <-limit:
			return failed
		}
	}
	return failed
}

// bulks measures downloads and uploads: Gbit/s at the receiver, and CPU seconds per GiB.
func (l *load) bulks() error {
	for _, streams := range l.plan.Streams {
		for _, direction := range []string{"down", "up"} {
			name := fmt.Sprintf("%s_%d", direction, streams)
			if err := l.bulk(name, direction == "up", streams); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
	}
	return nil
}

type reading struct {
	at    time.Time
	bytes int64
	cpu   float64
}

func (l *load) read(t *transfers) (r reading, err error) {
	if r.bytes, err = t.bytes(); err != nil {
		return r, err
	}
	r.at = time.Now()
	r.cpu, err = l.processes.cpuSeconds()
	return r, err
}

func (l *load) bulk(name string, up bool, streams int) error {
	t, err := l.start(up, streams, 0)
	if err != nil {
		return err
	}
	time.Sleep(l.plan.lasting() / 3)
	before, err := l.read(t)
	if err != nil {
		return err
	}
	time.Sleep(l.plan.lasting())
	after, err := l.read(t)
	if err := errors.Join(err, t.end()); err != nil {
		return err
	}
	bytes := float64(after.bytes - before.bytes)
	if bytes == 0 {
		return errors.New("not a byte arrived")
	}
	l.values[name+"_gbit_s"] = bytes * 8 / after.at.Sub(before.at).Seconds() / 1e9
	if len(l.processes) > 0 {
		l.values[name+"_cpu_s_per_gib"] = (after.cpu - before.cpu) / (bytes / (1 << 30))
	}
	return nil
}
