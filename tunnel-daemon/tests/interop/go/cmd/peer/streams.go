package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"adit.invalid/interop/pattern"
	"adit.invalid/interop/target"
	"adit.invalid/interop/tunnel"
)

// echoMessages sends messages one by one and reads each back with a small buffer.
func echoMessages(args []string) (Result, error) {
	f := newClientFlags("echo")
	messages := f.Int("messages", 3, "messages to send, one after the other")
	size := f.Int("size", 25, "bytes in each")
	buffer := f.Int("read", 10, "bytes asked for with each read")
	gap := f.Duration("gap", 0, "pause between messages")
	f.parse(args)
	conn, err := f.open()
	if err != nil {
		return nil, err
	}
	var reads []int
	times := make([]time.Duration, 0, *messages)
	for n := range *messages {
		begin := time.Now()
		message := []byte(strings.Repeat(fmt.Sprintf("%05d", n), *size/5+1))[:*size]
		if _, err := conn.Write(message); err != nil {
			return nil, err
		}
		got := make([]byte, 0, *size)
		for len(got) < *size {
			piece := make([]byte, *buffer)
			read, err := conn.Read(piece)
			got = append(got, piece[:read]...)
			if len(reads) < 32 {
				reads = append(reads, read)
			}
			if err != nil {
				return Result{"reads": reads}, fmt.Errorf("reading message %d: %w", n, err)
			}
		}
		if !bytes.Equal(got, message) {
			return Result{"reads": reads}, fmt.Errorf("message %d came back as %q", n, got)
		}
		times = append(times, time.Since(begin))
		time.Sleep(*gap)
	}
	slices.Sort(times)
	result := Result{"reads": reads, "messages": *messages}
	if len(times) > 0 {
		result["p50_us"] = times[len(times)/2].Microseconds()
		result["p99_us"] = times[len(times)*99/100].Microseconds()
	}
	if err := conn.Close(); err != nil {
		result["close_error"] = err.Error()
	}
	result["done"] = conn.Ended(5 * time.Second)
	return result, nil
}

// readBanner opens tunnels to a server-first target one after the other.
func readBanner(args []string) (Result, error) {
	f := newClientFlags("banner")
	times := f.Int("times", 1, "tunnels, one after the other")
	f.parse(args)
	for n := range *times {
		conn, err := f.open()
		if err != nil {
			return Result{"times": n}, err
		}
		got := make([]byte, len(target.Banner))
		timer := time.AfterFunc(f.timeout, func() { _ = conn.Close() })
		_, err = io.ReadFull(conn, got)
		timer.Stop()
		_ = conn.Close()
		if err != nil || string(got) != target.Banner {
			return Result{"times": n}, errors.Join(fmt.Errorf("read %q in place of the banner", got), err)
		}
	}
	return Result{"times": *times}, nil
}

func askSource(conn io.Writer, n int64) error {
	_, err := fmt.Fprintf(conn, "%d\n", n)
	return err
}

// bulkDown reads patterned bytes to their end.
func bulkDown(args []string) (Result, error) {
	f := newClientFlags("bulk-down")
	total := f.Int64("bytes", 1<<20, "bytes per stream")
	streams := f.Int("streams", 1, "tunnels at once")
	f.parse(args)
	return inParallel(*streams, func(_ int) (Result, error) {
		conn, err := f.open()
		if err != nil {
			return nil, err
		}
		defer conn.Close()
		if err := askSource(conn, *total); err != nil {
			return nil, err
		}
		var checker pattern.Checker
		_, err = io.CopyBuffer(&checker, struct{ io.Reader }{conn}, make([]byte, 64<<10))
		result := Result{"bytes": checker.Bytes(), "sum": checker.Sum(), "intact": checker.Intact()}
		if err == nil && (checker.Bytes() != *total || !checker.Intact()) {
			err = fmt.Errorf("got %d of %d bytes, intact: %t", checker.Bytes(), *total, checker.Intact())
		}
		return result, err
	})
}

// bulkUp writes patterned bytes; the sink's own count decides.
func bulkUp(args []string) (Result, error) {
	f := newClientFlags("bulk-up")
	total := f.Int64("bytes", 1<<20, "bytes per stream")
	streams := f.Int("streams", 1, "tunnels at once")
	piece := f.Int("piece", 32<<10, "bytes per write, 64 KiB at most unless alone in a stream")
	closeAtOnce := f.Bool("close-at-once", false, "close right after the last byte in place of waiting for the sink's answer")
	id := f.String("id", "upload", "name under which the sink reports")
	f.parse(args)
	return inParallel(*streams, func(stream int) (Result, error) {
		conn, err := f.open()
		if err != nil {
			return nil, err
		}
		defer conn.Close()
		want := *total
		if *closeAtOnce {
			want = -1
		}
		if _, err := fmt.Fprintf(conn, "%s-%d %d\n", *id, stream, want); err != nil {
			return nil, err
		}
		for sent := int64(0); sent < *total; {
			buffer := make([]byte, 0, *piece)
			for len(buffer) < *piece && sent < *total {
				part := pattern.At(sent, int(min(*total-sent, int64(*piece-len(buffer)))))
				buffer = append(buffer, part...)
				sent += int64(len(part))
			}
			if _, err := conn.Write(buffer); err != nil {
				return nil, err
			}
		}
		if *closeAtOnce {
			return Result{}, conn.Close()
		}
		var bytes int64
		var sum string
		var intact bool
		if _, err := fmt.Fscanf(conn, "%d %s %t\n", &bytes, &sum, &intact); err != nil {
			return nil, fmt.Errorf("reading the sink's answer: %w", err)
		}
		result := Result{"bytes": bytes, "sum": sum, "intact": intact}
		if bytes != *total || !intact {
			return result, fmt.Errorf("the sink got %d of %d bytes, intact: %t", bytes, *total, intact)
		}
		return result, nil
	})
}

// inParallel runs the same thing several times at once and reports the first stream's result and the first error.
func inParallel(streams int, run func(stream int) (Result, error)) (Result, error) {
	results := make([]Result, streams)
	failures := make([]error, streams)
	var group sync.WaitGroup
	for stream := range streams {
		group.Go(func() { results[stream], failures[stream] = run(stream) })
	}
	group.Wait()
	result := results[0]
	if result == nil {
		result = Result{}
	}
	result["streams"] = streams
	return result, errors.Join(failures...)
}

// slowRead takes bytes at a fixed rate for a while and reports whether they stayed the right ones.
func slowRead(args []string) (Result, error) {
	f := newClientFlags("slow-read")
	rate := f.Int("rate", 20_000, "bytes a second")
	lasting := f.Duration("for", 10*time.Second, "how long")
	total := f.Int64("bytes", 0, "what the source sends, 0 = without end; more than is read")
	f.parse(args)
	conn, err := f.open()
	if err != nil {
		return nil, err
	}
	if err := askSource(conn, *total); err != nil {
		return nil, err
	}
	var checker pattern.Checker
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	end := time.After(*lasting)
	buffer := make([]byte, max(1, *rate/10))
	for {
		select {
		case <-end:
			result := Result{"bytes": checker.Bytes(), "intact": checker.Intact()}
			if !checker.Intact() {
				return result, errors.New("the bytes are not the source's")
			}
			_ = conn.Close()
			return result, nil
		case <-tick.C:
			n, err := conn.Read(buffer)
			_, _ = checker.Write(buffer[:n])
			if err != nil {
				return Result{"bytes": checker.Bytes(), "intact": checker.Intact()}, fmt.Errorf("reading: %w", err)
			}
		}
	}
}

// stall opens downloads and reads nothing, until stdin closes. In gRPC mode the library itself gives up after 10 s.
func stall(args []string) (Result, error) {
	f := newClientFlags("stall")
	streams := f.Int("streams", 4, "tunnels to leave unread")
	total := f.Int64("bytes", 0, "what each source sends, 0 = without end")
	f.parse(args)
	closed := stdinClosed()
	var lost atomic.Int64
	conns := make([]*tunnel.Conn, 0, *streams)
	for range *streams {
		conn, err := f.open()
		if err != nil {
			return nil, err
		}
		if err := askSource(conn, *total); err != nil {
			return nil, err
		}
		conns = append(conns, conn)
		if conn.Done != nil {
			go func() {
				<-conn.Done
				lost.Add(1)
			}()
		}
	}
	emit(Result{"event": "stalled", "streams": *streams})
	<-closed
	return Result{"lost": lost.Load(), "streams": len(conns)}, nil
}

// runTarget serves all targets until stdin closes.
func runTarget(_ []string) (Result, error) {
	set, err := target.Start()
	if err != nil {
		return nil, err
	}
	emit(Result{"event": "listening", "ports": set.Ports})
	<-stdinClosed()
	return Result{}, nil
}
