package main

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"adit.invalid/interop/tunnel"
)

type weight struct {
	resident []float64
	slab     float64
}

func (l *load) weigh() (w weight, err error) {
	time.Sleep(300 * time.Millisecond) // until allocators and the kernel have settled
	if w.resident, err = l.processes.residentKiB(); err != nil {
		return w, err
	}
	w.slab, err = field("/proc/meminfo", "SUnreclaim:", 0)
	return w, err
}

func (w weight) sum() (total float64) {
	for _, one := range w.resident {
		total += one
	}
	return total
}

// idle weighs tunnels that carry nothing: what processes and kernel gained, by tunnel.
func (l *load) idle() error {
	var conns []*tunnel.Conn
	defer func() {
		var group sync.WaitGroup
		for _, conn := range conns {
			group.Go(func() { _ = conn.Close() })
		}
		group.Wait()
	}()
	// A few first, so that what every process sets up once is not counted.
	const first = 8
	openUntil := func(count int) error {
		more, err := l.openAll(l.targets.Echo, max(first+count-len(conns), 0))
		conns = append(conns, more...)
		return err
	}
	if err := openUntil(0); err != nil {
		return err
	}
	before, err := l.weigh()
	if err != nil {
		return err
	}
	counts := slices.Clone(l.plan.Idle)
	slices.Sort(counts)
	for _, count := range counts {
		if count <= 0 {
			continue
		}
		if err := openUntil(count); err != nil {
			return err
		}
		after, err := l.weigh()
		if err != nil {
			return err
		}
		l.note(count, before, after)
	}
	return nil
}

func (l *load) note(count int, before, after weight) {
	each := func(before, after float64) float64 { return (after - before) / float64(count) }
	values, name := l.values, fmt.Sprintf("idle_%d", count)
	for at, process := range l.processes {
		values[name+"_"+process.role+"_kib"] = each(before.resident[at], after.resident[at])
	}
	if len(l.processes) > 0 {
		values[name+"_kib"] = each(before.sum(), after.sum())
		values[name+"_resident_mib"] = after.sum() / 1024
	}
	values[name+"_kernel_kib"] = each(before.slab, after.slab)
}
