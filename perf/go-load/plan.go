package main

import (
	"fmt"
	"math"
	"slices"
	"time"
)

// plan is what to measure and how much of it, as in perf/plan.
type plan struct {
	Measurements    []string `json:"measurements"`
	Seconds         float64  `json:"seconds"`
	Streams         []int    `json:"streams"`
	Connections     []int    `json:"connections"`
	Burst           int      `json:"burst_connections"`
	Rates           []int    `json:"rates"`
	RateConnections int      `json:"rate_connections"`
	Dialers         []int    `json:"dialers"`
	Idle            []int    `json:"idle"`
	Agents          []int    `json:"agents"`         // of adit-load alone
	AgentsSeconds   float64  `json:"agents_seconds"` // the same
	StalledReaders  int      `json:"stalled_readers"`
	MixedStreams    int      `json:"mixed_streams"`
	LimitedMbitS    int64    `json:"limited_mbit_s"`
	Counted         counted  `json:"counted"`
}

// counted is what is done a fixed number of times.
type counted struct {
	Operation   string `json:"operation"`
	Connections int    `json:"connections"`
	Times       int    `json:"times"`
}

func (p plan) lasting() time.Duration {
	return time.Duration(p.Seconds * float64(time.Second))
}

// latencies notes p50, p99 and p99.9 of the samples.
func (l *load) latencies(name string, samples []time.Duration) error {
	if len(samples) == 0 {
		return fmt.Errorf("%s: not one answer came", name)
	}
	slices.Sort(samples)
	l.values[name+"_p50_us"] = quantile(samples, 0.5)
	l.values[name+"_p99_us"] = quantile(samples, 0.99)
	l.values[name+"_p999_us"] = quantile(samples, 0.999)
	return nil
}

// rate notes how many operations were done a second, and the CPU time of each since cpuBefore.
func (l *load) rate(name string, count int, took time.Duration, cpuBefore float64) error {
	l.values[name+"_per_s"] = float64(count) / took.Seconds()
	return l.cpuEach(name, count, cpuBefore)
}

// cpuEach notes the CPU time of each of count operations since cpuBefore.
func (l *load) cpuEach(name string, count int, cpuBefore float64) error {
	cpu, err := l.processes.cpuSeconds()
	if len(l.processes) > 0 && count > 0 {
		l.values[name+"_cpu_us"] = (cpu - cpuBefore) * 1e6 / float64(count)
	}
	return err
}

// quantile is the smallest sample that at least the share q of all does not exceed, in microseconds.
func quantile(sorted []time.Duration, q float64) float64 {
	// The epsilon keeps 0.99 of 100 samples at the 99th in spite of binary fractions.
	at := int(math.Ceil(q*float64(len(sorted))-1e-9)) - 1
	at = min(max(at, 0), len(sorted)-1)
	return float64(sorted[at].Nanoseconds()) / 1e3
}
