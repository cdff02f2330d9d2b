// Package target offers what tests and load tools dial through a tunnel: an HTTP server, echo, a source and a sink
// of patterned bytes, and endpoints that misbehave.
package target

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"adit.invalid/interop/pattern"
)

// Ports of one set of targets, all on 127.0.0.1.
type Ports struct {
	// HTTP answers /hello, /bytes?n=, /wait?ms=, /echo (POST) and /sink?id= (what a sink received).
	HTTP int `json:"http"`
	// Echo sends back what it gets, half-close included.
	Echo int `json:"echo"`
	// Source reads a line with a number and sends as many patterned bytes (0 = for ever), then closes.
	Source int `json:"source"`
	// Sink reads a line "ID N", takes N patterned bytes (-1 = to the end), answers "BYTES SUM INTACT" and a newline.
	Sink int `json:"sink"`
	// Banner speaks first, then echoes.
	Banner int `json:"banner"`
	// Stalled accepts and never reads.
	Stalled int `json:"stalled"`
	// Closed is bound but does not listen: connecting is refused, and nobody else can take the port.
	Closed int `json:"closed"`
	// BlackHole has a full backlog, so a SYN to it is never answered.
	BlackHole int `json:"black_hole"`
}

// Banner is what the server-first target says.
const Banner = "220 ready\r\n"

// Received is what a sink took over one connection.
type Received struct {
	Bytes  int64  `json:"bytes"`
	Sum    string `json:"sum"`
	Intact bool   `json:"intact"`
	Done   bool   `json:"done"`
}

// Set is a running set of targets; it lives as long as the process.
type Set struct {
	Ports Ports
	mu    sync.Mutex
	sinks map[string]Received
	held  []net.Conn
}

// Start opens all targets.
func Start() (*Set, error) {
	set := &Set{sinks: map[string]Received{}}
	for _, one := range []struct {
		port  *int
		serve func(net.Conn)
	}{
		{&set.Ports.Echo, echo},
		{&set.Ports.Source, source},
		{&set.Ports.Sink, set.sink},
		{&set.Ports.Banner, banner},
		{&set.Ports.Stalled, set.hold},
	} {
		port, err := listen(one.serve)
		if err != nil {
			return nil, err
		}
		*one.port = port
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	set.Ports.HTTP = portOf(listener.Addr())
	go func() { _ = http.Serve(listener, set.routes()) }()
	if set.Ports.Closed, _, err = rawSocket(-1); err != nil {
		return nil, err
	}
	set.Ports.BlackHole, err = blackHole()
	return set, err
}

func listen(serve func(net.Conn)) (int, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go serve(conn)
		}
	}()
	return portOf(listener.Addr()), nil
}

func portOf(addr net.Addr) int { return addr.(*net.TCPAddr).Port }

func echo(conn net.Conn) {
	defer conn.Close()
	_, _ = io.Copy(struct{ io.Writer }{conn}, struct{ io.Reader }{conn})
}

func banner(conn net.Conn) {
	_, _ = io.WriteString(conn, Banner)
	echo(conn)
}

func source(conn net.Conn) {
	defer conn.Close()
	line, err := bufio.NewReaderSize(conn, 16).ReadString('\n')
	if err != nil {
		return
	}
	left, err := strconv.ParseInt(strings.TrimSpace(line), 10, 64)
	if err != nil {
		return
	}
	endless := left == 0
	var offset int64
	for endless || left > 0 {
		n := 64 << 10
		if !endless {
			n = int(min(left, int64(n)))
		}
		piece := pattern.At(offset, n)
		if _, err := conn.Write(piece); err != nil {
			return
		}
		offset += int64(len(piece))
		left -= int64(len(piece))
	}
}

func (s *Set) sink(conn net.Conn) {
	defer conn.Close()
	reader := bufio.NewReaderSize(conn, 256<<10)
	line, err := reader.ReadString('\n')
	if err != nil {
		return
	}
	var id string
	var want int64
	if _, err := fmt.Sscanf(line, "%s %d", &id, &want); err != nil {
		return
	}
	var checker pattern.Checker
	buffer := make([]byte, 256<<10)
	for want < 0 || checker.Bytes() < want {
		n, err := reader.Read(buffer)
		_, _ = checker.Write(buffer[:n])
		s.record(id, &checker, false)
		if err != nil {
			break
		}
	}
	s.record(id, &checker, true)
	_, _ = fmt.Fprintf(conn, "%d %s %t\n", checker.Bytes(), checker.Sum(), checker.Intact())
}

func (s *Set) record(id string, checker *pattern.Checker, done bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sinks[id] = Received{Bytes: checker.Bytes(), Sum: checker.Sum(), Intact: checker.Intact(), Done: done}
}

// hold keeps the connection and never reads; the small buffer makes the sender feel it soon.
func (s *Set) hold(conn net.Conn) {
	_ = conn.(*net.TCPConn).SetReadBuffer(4096)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held = append(s.held, conn)
}

func (s *Set) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/hello", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "hello from the target\n")
	})
	mux.HandleFunc("/wait", func(w http.ResponseWriter, r *http.Request) {
		ms, _ := strconv.Atoi(r.URL.Query().Get("ms"))
		select {
		case <-time.After(time.Duration(ms) * time.Millisecond):
			_, _ = io.WriteString(w, "waited\n")
		case <-r.Context().Done():
		}
	})
	mux.HandleFunc("/bytes", func(w http.ResponseWriter, r *http.Request) {
		left, _ := strconv.ParseInt(r.URL.Query().Get("n"), 10, 64)
		w.Header().Set("Content-Length", strconv.FormatInt(left, 10))
		for offset := int64(0); left > 0; {
			piece := pattern.At(offset, int(min(left, 64<<10)))
			if _, err := w.Write(piece); err != nil {
				return
			}
			offset += int64(len(piece))
			left -= int64(len(piece))
		}
	})
	mux.HandleFunc("/echo", func(w http.ResponseWriter, r *http.Request) {
		// All of it before the first byte back: net/http stops reading once a handler writes.
		body, err := io.ReadAll(r.Body)
		if err == nil {
			_, _ = w.Write(body)
		}
	})
	mux.HandleFunc("/sink", func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		got := s.sinks[r.URL.Query().Get("id")]
		s.mu.Unlock()
		_ = json.NewEncoder(w).Encode(got)
	})
	return mux
}

// rawSocket binds a socket to 127.0.0.1 and a free port; backlog below zero means it does not listen.
func rawSocket(backlog int) (int, int, error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, 0, err
	}
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return 0, 0, err
	}
	if backlog >= 0 {
		if err := syscall.Listen(fd, backlog); err != nil {
			return 0, 0, err
		}
	}
	name, err := syscall.Getsockname(fd)
	if err != nil {
		return 0, 0, err
	}
	return name.(*syscall.SockaddrInet4).Port, fd, nil
}

// blackHole fills the backlog of a socket that nobody accepts on, until a connect no longer gets through.
func blackHole() (int, error) {
	port, _, err := rawSocket(0)
	if err != nil {
		return 0, err
	}
	for range 16 {
		conn, err := net.DialTimeout("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), 200*time.Millisecond)
		if err != nil {
			return port, nil
		}
		// Kept open for the life of the process: it must go on filling the backlog.
		keep = append(keep, conn)
	}
	return 0, fmt.Errorf("port %d still takes connections with a backlog of 0: no black hole here", port)
}

var keep []net.Conn
