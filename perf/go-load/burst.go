package main

import (
	"fmt"
	"time"

	"adit.invalid/interop/tunnel"
)

// bursts measures echo on connections that were dialled all at once, on a fresh path and again.
func (l *load) bursts() error {
	for _, burst := range []string{"cold", "warm"} {
		name := fmt.Sprintf("%s_%d", burst, l.plan.Burst)
		conns := make([]*tunnel.Conn, l.plan.Burst)
		// How long each dial and its first answer took.
		dials, err := together(len(conns), func(at int) (took time.Duration, err error) {
			begin := time.Now()
			if conns[at], err = l.open(l.targets.Echo); err == nil {
				err = roundTrip(conns[at], 0)
			}
			return time.Since(begin), err
		})
		if err == nil {
			err = warmUp(conns)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		cpu, err := l.processes.cpuSeconds()
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		samples, err := askAll(conns, untilTime(time.Now().Add(l.plan.lasting())))
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if err := l.rate(name, len(samples), l.plan.lasting(), cpu); err != nil {
			return err
		}
		if err := l.latencies(name, samples); err != nil {
			return err
		}
		if err := l.latencies(name+"_dial", dials); err != nil {
			return err
		}
	}
	return nil
}
