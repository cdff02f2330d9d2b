package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"time"
)

// mixed measures echo beside downloads that take all they get, and beside downloads at a limited rate, equal for all peers.
func (l *load) mixed() error {
	t, err := l.start(false, l.plan.MixedStreams, 0)
	if err != nil {
		return err
	}
	if l.values["mixed_down_gbit_s"], err = l.beside(t, "mixed_echo"); err != nil {
		return err
	}
	if l.plan.LimitedMbitS == 0 || l.plan.MixedStreams == 0 {
		return nil
	}
	rate := l.plan.LimitedMbitS * 1_000_000 / 8 / int64(l.plan.MixedStreams)
	if t, err = l.start(false, l.plan.MixedStreams, rate); err != nil {
		return err
	}
	name := fmt.Sprintf("limited_%d", l.plan.LimitedMbitS)
	l.values[name+"_gbit_s"], err = l.beside(t, name)
	return err
}

// beside measures echo beside transfers, and ends them; it returns their rate.
func (l *load) beside(t *transfers, name string) (float64, error) {
	time.Sleep(l.plan.lasting() / 3)
	before, _ := t.bytes() // counted here: cannot fail
	begin := time.Now()
	samples, err := l.closedLoop(1, l.plan.lasting())
	after, _ := t.bytes()
	took := time.Since(begin)
	if err := errors.Join(err, t.end()); err != nil {
		return 0, err
	}
	return float64(after-before) * 8 / took.Seconds() / 1e9, l.latencies(name, samples)
}

// isolation compares echo beside readers that never read with echo alone, in this same run.
func (l *load) isolation() error {
	calm, err := l.closedLoop(1, l.plan.lasting()/2)
	if err != nil {
		return err
	}
	stalled, err := l.openAll(l.targets.Source, l.plan.StalledReaders)
	if err != nil {
		return err
	}
	// All are open before the first stalls: a server that lets one stall the others would not even take the next dial.
	for _, conn := range stalled {
		if _, err := io.WriteString(conn, "0\n"); err != nil {
			return err
		}
	}
	time.Sleep(500 * time.Millisecond) // until every buffer on the way is full
	beside, completed := l.closedLoopWithin(l.plan.lasting() + 3*time.Second)
	for _, conn := range stalled {
		go conn.Close() // may wait for ten seconds in the library
	}
	values := l.values
	values["isolation_completed"] = 0
	if completed && len(beside) > 0 {
		// The other half of the calm time comes afterwards, so that a machine that changes its pace meanwhile does less.
		time.Sleep(200 * time.Millisecond)
		after, err := l.closedLoop(1, l.plan.lasting()/2)
		if err != nil {
			return err
		}
		calm = append(calm, after...)
		if len(calm) == 0 {
			return errors.New("not one answer came")
		}
		slices.Sort(calm)
		slices.Sort(beside)
		values["isolation_completed"] = 1
		values["isolation_p50_ratio"] = quantile(beside, 0.50) / quantile(calm, 0.50)
		values["isolation_p99_ratio"] = quantile(beside, 0.99) / quantile(calm, 0.99)
	}
	return nil
}

// closedLoopWithin gives up on an echo that is stalled itself.
func (l *load) closedLoopWithin(limit time.Duration) ([]time.Duration, bool) {
	type result struct {
		times []time.Duration
		err   error
	}
	done := make(chan result, 1)
	go func() {
		times, err := l.closedLoop(1, l.plan.lasting())
		done <- result{times, err}
	}()
	select {
	case r := <-done:
		return r.times, r.err == nil
	case <-time.After(limit):
		return nil, false
	}
}
