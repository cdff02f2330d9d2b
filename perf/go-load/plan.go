package main

import (
	"fmt"
	"math"
	"slices"
	"time"
)

// plan is what to measure and how much of it; the fields are those of adit-load.
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
	Counted         counted  `json:"counted"`
}

// counted is what is done a fixed number of times.
type counted struct {
	Operation   string `json:"operation"`
	Connections int    `json:"connections"`
	Times       int    `json:"times"`
}

func defaults() plan {
	return plan{
		Measurements: []string{"burst", "idle", "echo", "paced", "dials", "bulk", "mixed", "isolation"},
		Seconds:      1, Streams: []int{1, 8, 64}, Connections: []int{1, 16, 128},
		Burst: 16, Rates: []int{500, 2000}, RateConnections: 16, Dialers: []int{1, 8}, Idle: []int{2000},
		StalledReaders: 4, MixedStreams: 8,
	}
}

func (p plan) lasting() time.Duration {
	return time.Duration(p.Seconds * float64(time.Second))
}

// outcome is what a run prints.
type outcome struct {
	Values        map[string]float64      `json:"values"`
	Distributions map[string]distribution `json:"distributions"`
}

// distribution holds exact quantiles: share of samples, and microseconds this share did not exceed.
type distribution struct {
	Samples   int          `json:"samples"`
	Quantiles [][2]float64 `json:"quantiles_us"`
}

func newOutcome() outcome {
	return outcome{Values: map[string]float64{}, Distributions: map[string]distribution{}}
}

// latencies notes p50, p99 and p99.9 of the samples, and their distribution.
func (o outcome) latencies(name string, samples []time.Duration) error {
	if len(samples) == 0 {
		return fmt.Errorf("%s: not one answer came", name)
	}
	slices.Sort(samples)
	for _, point := range []struct {
		suffix string
		q      float64
	}{{"p50", 0.5}, {"p99", 0.99}, {"p999", 0.999}} {
		o.Values[name+"_"+point.suffix+"_us"] = quantile(samples, point.q)
	}
	points := [][2]float64{}
	for _, q := range []float64{0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 0.9999, 1} {
		points = append(points, [2]float64{q, quantile(samples, q)})
	}
	o.Distributions[name] = distribution{Samples: len(samples), Quantiles: points}
	return nil
}

// quantile is the smallest sample that at least the share q of all does not exceed, in microseconds.
func quantile(sorted []time.Duration, q float64) float64 {
	// The epsilon keeps 0.99 of 100 samples at the 99th in spite of binary fractions.
	at := int(math.Ceil(q*float64(len(sorted))-1e-9)) - 1
	at = min(max(at, 0), len(sorted)-1)
	return float64(sorted[at].Nanoseconds()) / 1e3
}
