package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"adit.invalid/interop/tunnel"
)

// get asks for a path, several times over one persistent tunnel if told so.
func get(args []string) (Result, error) {
	f := newClientFlags("get")
	path := f.String("path", "/hello", "path and query to ask for")
	requests := f.Int("requests", 1, "requests over the same tunnel")
	pause := f.Bool("pause", false, "after the first request print an event and wait for a line on stdin")
	cancelTunnel := f.Duration("cancel-tunnel-after", 0, "end the tunnel's context after this long (gRPC)")
	expired := f.Bool("expired", false, "use a context that ended already")
	f.parse(args)

	life, endTunnel := context.WithCancel(context.Background())
	defer endTunnel()
	f.dialer.TunnelContext = life
	if *cancelTunnel > 0 {
		time.AfterFunc(*cancelTunnel, endTunnel)
	}
	ctx, cancel := context.WithTimeout(context.Background(), f.timeout)
	defer cancel()
	if *expired {
		ctx, cancel = context.WithDeadline(ctx, time.Now().Add(-time.Second))
		defer cancel()
	}

	opened := []*tunnel.Conn{}
	transport := &http.Transport{DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
		if len(opened) > 0 {
			return nil, errors.New("the persistent tunnel was lost; not opening another one")
		}
		conn, err := f.dialer.Dial(ctx, addr)
		if err != nil {
			return nil, err
		}
		opened = append(opened, conn)
		return conn, nil
	}}
	result := Result{}
	var err error
	var last time.Time
	for i := range *requests {
		if i == 1 && *pause {
			emit(Result{"event": "paused"})
			_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
		}
		last = time.Now()
		if err = getOnce(ctx, transport, "http://"+f.target+*path, result); err != nil {
			break
		}
	}
	result["last_request_ms"] = time.Since(last).Milliseconds()
	for _, conn := range opened {
		_ = conn.Close()
	}
	result["tunnels"] = len(opened)
	result["done"] = allEnded(opened)
	return result, err
}

func allEnded(tunnels []*tunnel.Conn) bool {
	ended := true
	for _, conn := range tunnels {
		ended = conn.Ended(5*time.Second) && ended
	}
	return ended
}

func getOnce(ctx context.Context, transport http.RoundTripper, url string, result Result) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	response, err := transport.RoundTrip(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	result["status"] = response.StatusCode
	hash := sha256.New()
	var head bytes.Buffer
	n, err := io.Copy(io.MultiWriter(hash, &limited{&head, 2048}), response.Body)
	result["length"] = n
	result["sha256"] = hex.EncodeToString(hash.Sum(nil))
	result["body"] = head.String()
	return err
}

// limited keeps the first bytes only.
type limited struct {
	to   *bytes.Buffer
	left int
}

func (l *limited) Write(p []byte) (int, error) {
	keep := min(l.left, len(p))
	l.to.Write(p[:keep])
	l.left -= keep
	return len(p), nil
}

// concurrent opens many tunnels at once. Each posts bodies of its own and wants exactly those back, or each gets a path.
func concurrent(args []string) (Result, error) {
	f := newClientFlags("concurrent")
	tunnels := f.Int("tunnels", 50, "tunnels at once")
	requests := f.Int("requests", 1, "requests in each")
	path := f.String("path", "", "GET this instead of posting to /echo")
	size := f.Int("size", 4096, "bytes of each posted body")
	cancelMin := f.Duration("cancel-min", 0, "cancel each request after at least this")
	cancelMax := f.Duration("cancel-max", 0, "and at most this")
	reuse := f.Bool("reuse", false, "all tunnels on one connection")
	f.parse(args)

	if *reuse {
		reused, err := f.dialer.Reuse(context.Background())
		if err != nil {
			return nil, err
		}
		defer reused.Close()
		f.dialer.Reused = reused
	}
	var good, failed, ended atomic.Int64
	var firstError atomic.Pointer[string]
	var group sync.WaitGroup
	for worker := range *tunnels {
		group.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), f.timeout)
			defer cancel()
			if *cancelMax > 0 {
				after := *cancelMin + rand.N(*cancelMax-*cancelMin+1)
				ctx, cancel = context.WithTimeout(ctx, after)
				defer cancel()
			}
			var conn *tunnel.Conn
			transport := &http.Transport{DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
				var err error
				conn, err = f.dialer.Dial(ctx, addr)
				return conn, err
			}}
			for n := range *requests {
				if err := ask(ctx, transport, f.target, *path, worker, n, *size); err != nil {
					failed.Add(1)
					text := err.Error()
					firstError.CompareAndSwap(nil, &text)
					break
				}
				good.Add(1)
			}
			// Not CloseIdleConnections: a connection whose body was just read may not count as idle yet.
			if conn != nil {
				_ = conn.Close()
			}
			if conn == nil || conn.Ended(12*time.Second) {
				ended.Add(1)
			}
		})
	}
	group.Wait()
	result := Result{"good": good.Load(), "failed": failed.Load(), "ended": ended.Load()}
	if text := firstError.Load(); text != nil {
		result["first_error"] = *text
	}
	if failed.Load() > 0 && *cancelMax == 0 {
		return result, fmt.Errorf("%d requests failed, first: %v", failed.Load(), result["first_error"])
	}
	return result, nil
}

func ask(ctx context.Context, transport http.RoundTripper, target, path string, worker, n, size int) error {
	if path != "" {
		return getOnce(ctx, transport, "http://"+target+path, Result{})
	}
	body := bytes.Repeat(fmt.Appendf(nil, "worker %d request %d;", worker, n), size/24+1)
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+target+"/echo", bytes.NewReader(body))
	if err != nil {
		return err
	}
	response, err := transport.RoundTrip(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	got, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	if !bytes.Equal(got, body) {
		return fmt.Errorf("worker %d got %d bytes that are not its own %d", worker, len(got), len(body))
	}
	return nil
}

// dialFail reports how a dial ended; when it worked after all, that is the failure.
func dialFail(args []string) (Result, error) {
	f := newClientFlags("dial-fail")
	f.parse(args)
	result := Result{}
	f.dialer.Failed = func(done <-chan struct{}) {
		result["done"] = (&tunnel.Conn{Done: done}).Ended(5 * time.Second)
	}
	start := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), f.timeout)
	defer cancel()
	conn, err := f.dialer.Dial(ctx, f.target)
	result["dial_ms"] = time.Since(start).Milliseconds()
	if err == nil {
		_ = conn.Close()
		emit(Result{"ok": false, "connected": true, "error": "the dial succeeded"})
		os.Exit(1)
	}
	return result, err
}
