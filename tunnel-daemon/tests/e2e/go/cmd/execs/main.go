// Command execs opens many execs at once, as kubectl would, and holds all of them open until each has answered.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/remotecommand"
)

// Limit of all of it.
const limit = time.Minute

type outcome struct {
	Answered int      `json:"answered"`
	Slowest  float64  `json:"slowest_seconds"`
	Errors   []string `json:"errors"`
}

func main() {
	kubeconfig := flag.String("kubeconfig", "", "access to the API server")
	pod := flag.String("pod", "", "pod of the default namespace")
	container := flag.String("container", "", "its container")
	count := flag.Int("count", 1, "how many")
	flag.Parse()
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		log.Fatal(err)
	}
	config.QPS, config.Burst = -1, 0
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		log.Fatal(err)
	}
	context, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()

	var (
		all      sync.WaitGroup
		answered sync.WaitGroup
		lock     sync.Mutex
		result   outcome
	)
	all.Add(*count)
	answered.Add(*count)
	for number := range *count {
		go func() {
			defer all.Done()
			request := client.CoreV1().RESTClient().Post().Resource("pods").Namespace("default").Name(*pod).SubResource("exec").
				VersionedParams(&corev1.PodExecOptions{Container: *container, Command: []string{"cat"}, Stdin: true, Stdout: true},
					scheme.ParameterCodec)
			seconds, err := one(context, config, request, fmt.Sprintf("exec %d\n", number), &answered)
			lock.Lock()
			defer lock.Unlock()
			if err != nil {
				result.Errors = append(result.Errors, err.Error())
				return
			}
			result.Answered++
			result.Slowest = max(result.Slowest, seconds)
		}()
	}
	all.Wait()
	json.NewEncoder(os.Stdout).Encode(result)
}

// one sends a line, reads it back, and stays until the others have done so. Returns the seconds until the answer.
func one(context context.Context, config *rest.Config, request *rest.Request, line string, answered *sync.WaitGroup) (float64, error) {
	var once sync.Once
	done := func() { once.Do(answered.Done) }
	defer done()
	began := time.Now()
	executor, err := remotecommand.NewWebSocketExecutor(config, "GET", request.URL().String())
	if err != nil {
		return 0, err
	}
	in, feed := io.Pipe()
	read, out := io.Pipe()
	streamed := make(chan error, 1)
	go func() {
		err := executor.StreamWithContext(context, remotecommand.StreamOptions{Stdin: in, Stdout: out})
		out.CloseWithError(err)
		in.CloseWithError(io.ErrClosedPipe)
		streamed <- err
	}()
	if _, err := io.WriteString(feed, line); err != nil {
		return 0, fmt.Errorf("before the line was sent: %w", <-streamed)
	}
	echo, err := bufio.NewReader(read).ReadString('\n')
	seconds := time.Since(began).Seconds()
	if err != nil || echo != line {
		feed.Close()
		return 0, fmt.Errorf("%q came back: %w", echo, err)
	}
	done()
	answered.Wait()
	feed.Close()
	go io.Copy(io.Discard, read)
	return seconds, <-streamed
}
