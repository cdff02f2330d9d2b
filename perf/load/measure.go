package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"adit.invalid/interop/tunnel"
)

// open dials with a limit that no healthy server reaches.
func (l *load) open(port int) (*tunnel.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	return l.dialer.Dial(ctx, l.address(port))
}

// bulks measures downloads and uploads with one and eight streams: Gbit/s, and CPU seconds per GiB of both processes.
func (l *load) bulks(result map[string]float64) error {
	for _, streams := range []int{1, 8} {
		for _, way := range []struct {
			name string
			run  func(*atomic.Int64, <-chan struct{}) error
		}{{"down", l.download}, {"up", l.upload}} {
			moved, took, cpu, err := l.bulk(streams, way.run)
			if err != nil {
				return fmt.Errorf("%s with %d streams: %w", way.name, streams, err)
			}
			key := fmt.Sprintf("%s_%d", way.name, streams)
			result[key+"_gbit_s"] = float64(moved) * 8 / took.Seconds() / 1e9
			result[key+"_cpu_s_per_gib"] = cpu / (float64(moved) / (1 << 30))
		}
	}
	return nil
}

// bulk warms the streams up, then counts bytes and CPU over the measured time only.
func (l *load) bulk(streams int, one func(*atomic.Int64, <-chan struct{}) error) (int64, time.Duration, float64, error) {
	var moved atomic.Int64
	stop := make(chan struct{})
	failures := make(chan error, streams)
	for range streams {
		go func() { failures <- one(&moved, stop) }()
	}
	time.Sleep(l.lasting / 3)
	bytesBefore, cpuBefore, begin := moved.Load(), l.cpuSeconds(), time.Now()
	time.Sleep(l.lasting)
	bytes, cpu, took := moved.Load()-bytesBefore, l.cpuSeconds()-cpuBefore, time.Since(begin)
	close(stop)
	var failed error
	for range streams {
		failed = errors.Join(failed, <-failures)
	}
	if failed == nil && bytes == 0 {
		failed = errors.New("not a byte moved")
	}
	return bytes, took, cpu, failed
}

// closeOn ends a transfer by closing its tunnel; the error that follows is expected.
func closeOn(stop <-chan struct{}, conn io.Closer) {
	go func() {
		<-stop
		_ = conn.Close()
	}()
}

func ended(stop <-chan struct{}, err error) error {
	select {
	case <-stop:
		return nil
	default:
		return err
	}
}

func (l *load) download(moved *atomic.Int64, stop <-chan struct{}) error {
	conn, err := l.open(l.ports.Source)
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "0\n"); err != nil {
		return err
	}
	closeOn(stop, conn)
	buffer := make([]byte, 256<<10)
	for {
		n, err := conn.Read(buffer)
		moved.Add(int64(n))
		if err != nil {
			return ended(stop, err)
		}
		select {
		case <-stop:
			return nil
		default:
		}
	}
}

// upload counts what was written; back-pressure over a second of it makes the few MiB held in buffers on the way negligible.
func (l *load) upload(moved *atomic.Int64, stop <-chan struct{}) error {
	conn, err := l.open(l.ports.Sink)
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "load -1\n"); err != nil {
		return err
	}
	closeOn(stop, conn)
	buffer := make([]byte, 32<<10)
	for {
		n, err := conn.Write(buffer)
		moved.Add(int64(n))
		if err != nil {
			return ended(stop, err)
		}
		select {
		case <-stop:
			return nil
		default:
		}
	}
}

// echoes measures round trips of 64 bytes with one and sixteen tunnels.
func (l *load) echoes(result map[string]float64) error {
	for _, tunnels := range []int{1, 16} {
		times, err := l.echo(tunnels, l.lasting)
		if err != nil {
			return err
		}
		result[fmt.Sprintf("echo_%d_p50_us", tunnels)] = quantile(times, 0.50)
		result[fmt.Sprintf("echo_%d_p99_us", tunnels)] = quantile(times, 0.99)
	}
	return nil
}

func (l *load) echo(tunnels int, lasting time.Duration) ([]time.Duration, error) {
	var mu sync.Mutex
	var all []time.Duration
	var failed error
	var group sync.WaitGroup
	for range tunnels {
		group.Go(func() {
			times, err := l.echoOne(lasting)
			mu.Lock()
			defer mu.Unlock()
			all = append(all, times...)
			failed = errors.Join(failed, err)
		})
	}
	group.Wait()
	slices.Sort(all)
	return all, failed
}

func (l *load) echoOne(lasting time.Duration) ([]time.Duration, error) {
	conn, err := l.open(l.ports.Echo)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	message := bytes.Repeat([]byte("x"), 64)
	answer := make([]byte, len(message))
	var times []time.Duration
	for end := time.Now().Add(lasting); time.Now().Before(end); {
		begin := time.Now()
		if _, err := conn.Write(message); err != nil {
			return nil, err
		}
		if _, err := io.ReadFull(conn, answer); err != nil {
			return nil, err
		}
		times = append(times, time.Since(begin))
	}
	return times, nil
}

func quantile(sorted []time.Duration, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	at := min(int(float64(len(sorted))*q), len(sorted)-1)
	return float64(sorted[at].Nanoseconds()) / 1e3
}

// dials measures dial, one echo and close with eight workers.
func (l *load) dials(result map[string]float64) error {
	var done atomic.Int64
	var group sync.WaitGroup
	failures := make(chan error, 8)
	begin := time.Now()
	for range cap(failures) {
		group.Go(func() {
			message, answer := []byte("ping"), make([]byte, 4)
			for time.Since(begin) < l.lasting {
				conn, err := l.open(l.ports.Echo)
				if err == nil {
					_, err = conn.Write(message)
				}
				if err == nil {
					_, err = io.ReadFull(conn, answer)
				}
				if err != nil {
					failures <- err
					return
				}
				// The library may call the close of a tunnel that ended meanwhile an error (upstream's D-43).
				_ = conn.Close()
				done.Add(1)
			}
		})
	}
	group.Wait()
	close(failures)
	result["dials_per_s"] = float64(done.Load()) / time.Since(begin).Seconds()
	return <-failures
}

// idleMemory weighs idle tunnels: resident KiB that both processes gained, by tunnel.
func (l *load) idleMemory(result map[string]float64) error {
	// A few first, so that what every process sets up once is not counted.
	conns := make([]*tunnel.Conn, 0, l.idle+8)
	defer func() {
		var group sync.WaitGroup
		for _, conn := range conns {
			group.Go(func() { _ = conn.Close() })
		}
		group.Wait()
	}()
	add := func(count int) error {
		for range count {
			conn, err := l.open(l.ports.Echo)
			if err != nil {
				return err
			}
			conns = append(conns, conn)
		}
		return nil
	}
	if err := add(8); err != nil {
		return err
	}
	server, agent := residentKiB(l.server), residentKiB(l.agent)
	if err := add(l.idle); err != nil {
		return err
	}
	time.Sleep(300 * time.Millisecond)
	serverGained, agentGained := residentKiB(l.server)-server, residentKiB(l.agent)-agent
	result["idle_server_kib"] = serverGained / float64(l.idle)
	result["idle_agent_kib"] = agentGained / float64(l.idle)
	result["idle_kib"] = (serverGained + agentGained) / float64(l.idle)
	return nil
}

// isolation compares echo beside four readers that never read with echo alone, in this same run.
func (l *load) isolation(result map[string]float64) error {
	calm, err := l.echo(1, l.lasting)
	if err != nil {
		return err
	}
	stalled := make([]*tunnel.Conn, 0, 4)
	for range cap(stalled) {
		conn, err := l.open(l.ports.Source)
		if err != nil {
			return err
		}
		stalled = append(stalled, conn)
	}
	// All are open before the first stalls: a server that lets one stall the others would not even take the next dial.
	for _, conn := range stalled {
		if _, err := io.WriteString(conn, "0\n"); err != nil {
			return err
		}
	}
	time.Sleep(500 * time.Millisecond) // until every buffer on the way is full
	beside, completed := l.echoWithin(l.lasting)
	for _, conn := range stalled {
		go conn.Close() // may wait for ten seconds in the library
	}
	result["isolation_completed"] = 0
	if completed && len(beside) > 0 {
		result["isolation_completed"] = 1
		result["isolation_p50_ratio"] = quantile(beside, 0.50) / quantile(calm, 0.50)
		result["isolation_p99_ratio"] = quantile(beside, 0.99) / quantile(calm, 0.99)
	}
	return nil
}

// echoWithin gives up on an echo that is stalled itself.
func (l *load) echoWithin(lasting time.Duration) ([]time.Duration, bool) {
	type outcome struct {
		times []time.Duration
		err   error
	}
	done := make(chan outcome, 1)
	go func() {
		times, err := l.echo(1, lasting)
		done <- outcome{times, err}
	}()
	select {
	case o := <-done:
		return o.times, o.err == nil
	case <-time.After(lasting + 3*time.Second):
		return nil, false
	}
}

func residentKiB(pid int) float64 {
	file, err := os.Open(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	defer file.Close()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		if rest, found := strings.CutPrefix(lines.Text(), "VmRSS:"); found {
			kib, _ := strconv.ParseFloat(strings.Fields(rest)[0], 64)
			return kib
		}
	}
	return 0
}

// ticksPerSecond is USER_HZ, which Linux fixes at 100 for everything it shows to programs.
const ticksPerSecond = 100

// cpuSeconds is user and system time of both processes.
func (l *load) cpuSeconds() float64 {
	total := 0.0
	for _, pid := range []int{l.server, l.agent} {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			continue
		}
		// The name may hold blanks: fields are counted behind its closing bracket.
		_, rest, _ := strings.Cut(string(stat), ") ")
		fields := strings.Fields(rest)
		if len(fields) < 13 {
			continue
		}
		user, _ := strconv.ParseFloat(fields[11], 64)
		system, _ := strconv.ParseFloat(fields[12], 64)
		total += (user + system) / ticksPerSecond
	}
	return total
}
