package main

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"adit.invalid/interop/tunnel"
)

// bursts measures echo on connections that were dialled all at once, on a fresh path and again.
func (l *load) bursts() error {
	for _, burst := range []string{"cold", "warm"} {
		name := fmt.Sprintf("%s_%d", burst, l.plan.Burst)
		conns, dials, err := l.openAtOnce(l.plan.Burst)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		samples, err := askAll(conns, l.plan.lasting())
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		l.outcome.Values[name+"_per_s"] = float64(len(samples)) / l.plan.Seconds
		if err := l.outcome.latencies(name, samples); err != nil {
			return err
		}
		if err := l.outcome.latencies(name+"_dial", dials); err != nil {
			return err
		}
	}
	return nil
}

// openAtOnce also returns how long each dial and its first answer took.
func (l *load) openAtOnce(connections int) ([]*tunnel.Conn, []time.Duration, error) {
	var mu sync.Mutex
	var conns []*tunnel.Conn
	var dials []time.Duration
	var failed error
	var group sync.WaitGroup
	for range connections {
		group.Go(func() {
			begin := time.Now()
			conn, err := l.open(l.targets.Echo)
			if err == nil {
				err = roundTrip(conn, 0)
			}
			took := time.Since(begin)
			mu.Lock()
			defer mu.Unlock()
			conns, dials = append(conns, conn), append(dials, took)
			failed = errors.Join(failed, err)
		})
	}
	group.Wait()
	for _, conn := range conns {
		for number := range uint64(warmUp) {
			if failed == nil {
				failed = roundTrip(conn, number)
			}
		}
	}
	return conns, dials, failed
}
