package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/creack/pty"
	"k8s.io/cri-streaming/pkg/streaming/portforward"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	utilexec "k8s.io/utils/exec"
)

const (
	idle     = time.Hour
	creation = 30 * time.Second
	// Lines of a log, and how often one is added.
	lines = 1000
	pace  = 50 * time.Millisecond
)

// kubelet serves the paths of a kubelet that the API server asks for, for any pod and container.
func kubelet(address, containers string) http.Handler {
	node := node{address, containers}
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "ok") })
	mux.HandleFunc("/metrics", metrics)
	mux.HandleFunc("/exec/{namespace}/{pod}/{container}", node.exec)
	mux.HandleFunc("/attach/{namespace}/{pod}/{container}", node.attach)
	mux.HandleFunc("/portForward/{namespace}/{pod}", node.portForward)
	mux.HandleFunc("/containerLogs/{namespace}/{pod}/{container}", node.logs)
	return mux
}

type node struct{ address, containers string }

func (n node) exec(w http.ResponseWriter, r *http.Request) {
	options, err := remotecommand.NewOptions(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	command := r.URL.Query()["command"]
	remotecommand.ServeExec(w, r, n, r.PathValue("pod"), "", r.PathValue("container"), command, options, idle, creation,
		remotecommand.SupportedStreamingProtocols)
}

func (n node) attach(w http.ResponseWriter, r *http.Request) {
	options, err := remotecommand.NewOptions(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	remotecommand.ServeAttach(w, r, n, r.PathValue("pod"), "", r.PathValue("container"), options, idle, creation,
		remotecommand.SupportedStreamingProtocols)
}

func (n node) portForward(w http.ResponseWriter, r *http.Request) {
	options, err := portforward.NewV4Options(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	portforward.ServePortForward(w, r, n, r.PathValue("pod"), "", options, idle, creation, portforward.SupportedProtocols)
}

// ExecInContainer runs a program of the pod's container, if that runs. Else it is one of this host: the only container is the network
// namespace.
func (n node) ExecInContainer(ctx context.Context, pod, _, _ string, command []string, in io.Reader, out, stderr io.WriteCloser,
	tty bool, resize <-chan remotecommand.TerminalSize, _ time.Duration) error {
	if len(command) == 0 {
		return errors.New("no command")
	}
	var environment []string
	if id, err := os.ReadFile(filepath.Join(n.containers, pod)); err == nil {
		command = append([]string{"nsenter", "--target=" + string(id), "--mount", "--root"}, command...)
		variables, err := os.ReadFile(filepath.Join("/proc", string(id), "environ"))
		if err != nil {
			return err
		}
		environment = strings.Split(strings.TrimSuffix(string(variables), "\x00"), "\x00")
	}
	program := exec.CommandContext(ctx, command[0], command[1:]...)
	// Without a container that of this process.
	program.Env = environment
	var err error
	if tty {
		err = onTerminal(program, in, out, resize)
	} else {
		err = plain(program, in, out, stderr)
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return utilexec.CodeExitError{Err: err, Code: exit.ExitCode()}
	}
	return err
}

func plain(program *exec.Cmd, in io.Reader, out, stderr io.WriteCloser) error {
	if out != nil {
		program.Stdout = out
	}
	if stderr != nil {
		program.Stderr = stderr
	}
	if in == nil {
		return program.Run()
	}
	// Its end must not wait for a client that sends no more.
	stdin, err := program.StdinPipe()
	if err != nil {
		return err
	}
	go func() {
		defer stdin.Close()
		io.Copy(stdin, in)
	}()
	return program.Run()
}

func onTerminal(program *exec.Cmd, in io.Reader, out io.Writer, resize <-chan remotecommand.TerminalSize) error {
	terminal, err := pty.Start(program)
	if err != nil {
		return err
	}
	defer terminal.Close()
	go func() {
		for size := range resize {
			pty.Setsize(terminal, &pty.Winsize{Rows: size.Height, Cols: size.Width})
		}
	}()
	if in != nil {
		go io.Copy(terminal, in)
	}
	// Ends in EIO with the program.
	io.Copy(out, terminal)
	return program.Wait()
}

// AttachContainer attaches to a program that says hello and repeats what it reads.
func (n node) AttachContainer(_ context.Context, _, _, _ string, in io.Reader, out, _ io.WriteCloser, _ bool,
	_ <-chan remotecommand.TerminalSize) error {
	if out == nil {
		return errors.New("no output")
	}
	if _, err := fmt.Fprintln(out, "attached"); err != nil || in == nil {
		return err
	}
	_, err := io.Copy(out, in)
	return err
}

// PortForward connects to a port of the pod.
func (n node) PortForward(_ context.Context, _, _ string, port int32, stream io.ReadWriteCloser) error {
	connection, err := net.Dial("tcp", net.JoinHostPort(n.address, strconv.Itoa(int(port))))
	if err != nil {
		return err
	}
	defer connection.Close()
	go func() {
		io.Copy(connection, stream)
		connection.(*net.TCPConn).CloseWrite()
	}()
	_, err = io.Copy(stream, connection)
	return err
}

// logs are a thousand numbered lines, to which more are added while somebody follows; those of the container `flood` come as
// fast as they are read.
func (n node) logs(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "text/plain")
	flusher := http.NewResponseController(w)
	write := func(number int) bool {
		_, err := fmt.Fprintf(w, "line %d\n", number)
		return err == nil
	}
	first := 1
	if tail, err := strconv.Atoi(r.FormValue("tailLines")); err == nil && tail < lines {
		first = lines - tail + 1
	}
	number := first
	for ; number <= lines; number++ {
		if !write(number) {
			return
		}
	}
	flusher.Flush()
	if r.FormValue("follow") != "true" {
		return
	}
	if r.PathValue("container") == "flood" {
		for write(number) {
			number++
		}
		return
	}
	ticker := time.NewTicker(pace)
	defer ticker.Stop()
	for ; ; number++ {
		select {
		case <-r.Context().Done():
			return
		case <-ticker.C:
		}
		if !write(number) || flusher.Flush() != nil {
			fmt.Fprintln(os.Stderr, "a reader of the log is gone")
			return
		}
	}
}
