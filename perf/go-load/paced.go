package main

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"adit.invalid/interop/tunnel"
)

// drainLimit is how long answers are waited for after the last question was due.
const drainLimit = 5 * time.Second

// paced measures round trips at fixed rates, each timed from the moment its question was due, whatever the answers do.
func (l *load) paced() error {
	for _, rate := range l.plan.Rates {
		name := fmt.Sprintf("paced_%d", rate)
		samples, unanswered, cpu, err := l.atRate(rate)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if err := l.cpuEach(name, len(samples), cpu); err != nil {
			return err
		}
		l.values[name+"_unanswered"] = float64(unanswered)
		if err := l.latencies(name, samples); err != nil {
			return err
		}
	}
	return nil
}

// atRate returns a duration for each question, how many had no answer, and the processes' CPU time before the first.
func (l *load) atRate(rate int) ([]time.Duration, int, float64, error) {
	count := int(float64(rate) * l.plan.Seconds)
	queues := make([]chan time.Time, max(l.plan.RateConnections, 1))
	conns, err := l.openAll(l.targets.Echo, len(queues))
	if err != nil {
		return nil, 0, 0, err
	}
	cpu, err := l.processes.cpuSeconds()
	if err != nil {
		return nil, 0, 0, err
	}
	for at := range queues {
		// Room for all questions: the pacer never waits.
		queues[at] = make(chan time.Time, count/len(queues)+1)
	}
	start := time.Now().Add(20 * time.Millisecond)
	due := func(number int) time.Time {
		return start.Add(time.Duration(number) * time.Second / time.Duration(rate))
	}
	giveUp := due(count).Add(drainLimit)
	// A read that never returns is ended by the close; the deadline of the library's connections is not to be relied on.
	closing := time.AfterFunc(time.Until(giveUp), func() {
		for _, conn := range conns {
			go conn.Close()
		}
	})
	defer closing.Stop()

	go func() {
		for number := range count {
			time.Sleep(time.Until(due(number)))
			queues[number%len(queues)] <- due(number)
		}
		for _, queue := range queues {
			close(queue)
		}
	}()
	var unanswered atomic.Int64
	all, err := together(len(conns), func(at int) ([]time.Duration, error) {
		defer conns[at].Close()
		times, left, err := ask(conns[at], queues[at], giveUp)
		unanswered.Add(int64(left))
		return times, err
	})
	return slices.Concat(all...), int(unanswered.Load()), cpu, err
}

// ask writes each question when it is due and times the answers, which come in the order of the questions.
func ask(conn *tunnel.Conn, queue <-chan time.Time, giveUp time.Time) ([]time.Duration, int, error) {
	pending := make(chan time.Time, cap(queue))
	broken := make(chan error, 1)
	go func() {
		defer close(pending)
		number := uint64(0)
		for due := range queue {
			pending <- due
			if _, err := conn.Write(message(number)); err != nil {
				broken <- err
				for range queue {
					// The pacer must not block on a connection that is gone.
				}
				return
			}
			number++
		}
		broken <- nil
	}()
	var times []time.Duration
	unanswered, number := 0, uint64(0)
	buffer := make([]byte, messageBytes)
	var failed error
	for due := range pending {
		if failed == nil {
			failed = readAnswer(conn, buffer, number)
		}
		times = append(times, time.Since(due))
		if failed != nil {
			unanswered++
		}
		number++
	}
	if !time.Now().Before(giveUp) {
		return times, unanswered, nil // closed by us: what is missing is counted
	}
	return times, unanswered, errors.Join(failed, <-broken)
}
