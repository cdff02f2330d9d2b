// Command node is what a control plane reaches on a node, in end-to-end tests: a kubelet, pods, an aggregated API server and
// webhooks. Logs, exec, attach and port-forward are served by the streaming code that container runtimes use.
package main

import (
	"crypto/tls"
	"crypto/x509"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
)

// Ports, which manifests of the tests know.
const (
	kubeletPort = "10250"
	podPort     = "8080"
	apiPort     = "8443"
	// Of all addresses that the node has: metrics, without TLS and with it.
	metricsPort  = "9100"
	metricsByTLS = "9443"
	// Of all addresses, too: the cluster's DNS, and a customer's proxy with TLS.
	namesPort    = "53"
	customerPort = "3129"
	everyAddress = "0.0.0.0"
)

func main() {
	address := flag.String("address", "", "address to listen on")
	certificate := flag.String("cert", "", "certificate of kubelet, aggregated API server and webhooks")
	key := flag.String("key", "", "its key")
	authority := flag.String("client-ca", "", "authority of the API server's client certificates")
	containers := flag.String("containers", "", "folder with a file for each pod that runs as a process: the process's id")
	flag.Parse()
	pair, err := tls.LoadX509KeyPair(*certificate, *key)
	if err != nil {
		log.Fatal(err)
	}
	pem, err := os.ReadFile(*authority)
	if err != nil {
		log.Fatal(err)
	}
	clients := x509.NewCertPool()
	if !clients.AppendCertsFromPEM(pem) {
		log.Fatalf("no certificate in %s", *authority)
	}
	listen := func(address, port string) net.Listener {
		listener, err := net.Listen("tcp", net.JoinHostPort(address, port))
		if err != nil {
			log.Fatal(err)
		}
		return listener
	}
	// Streams are upgraded from HTTP/1.1.
	protected := func(listener net.Listener, mode tls.ClientAuthType) net.Listener {
		return tls.NewListener(listener, &tls.Config{
			Certificates: []tls.Certificate{pair},
			ClientCAs:    clients,
			ClientAuth:   mode,
			NextProtos:   []string{"http/1.1"},
		})
	}
	failed := make(chan error)
	serve := func(listener net.Listener, handler http.Handler) {
		go func() { failed <- http.Serve(listener, handler) }()
	}
	serve(protected(listen(*address, kubeletPort), tls.RequireAndVerifyClientCert), kubelet(*address, *containers))
	// The API server shows no certificate to a webhook.
	serve(protected(listen(*address, apiPort), tls.VerifyClientCertIfGiven), extensions(*address))
	serve(listen(*address, podPort), pod(*address))
	serve(listen(everyAddress, metricsPort), http.HandlerFunc(metrics))
	serve(protected(listen(everyAddress, metricsByTLS), tls.NoClientCert), http.HandlerFunc(metrics))
	serve(protected(listen(everyAddress, customerPort), tls.NoClientCert), http.HandlerFunc(forward))
	go func() { failed <- names(listen(everyAddress, namesPort), net.ParseIP(*address)) }()
	fmt.Println("serving")
	log.Fatal(<-failed)
}

// pod answers with the address it was reached at.
func pod(address string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, "through the tunnel to %s", address)
	})
}
