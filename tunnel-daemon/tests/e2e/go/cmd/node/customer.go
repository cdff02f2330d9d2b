package main

import (
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
)

// User and password of the customer's proxy.
const (
	customer = "customer"
	secret   = "secret"
)

// forward is a customer's proxy: CONNECT for who has the password.
func forward(w http.ResponseWriter, r *http.Request) {
	given := &http.Request{Header: http.Header{"Authorization": r.Header["Proxy-Authorization"]}}
	if user, password, ok := given.BasicAuth(); !ok || user != customer || password != secret {
		w.Header().Set("Proxy-Authenticate", `Basic realm="customer"`)
		http.Error(w, "who are you?", http.StatusProxyAuthRequired)
		return
	}
	if r.Method != http.MethodConnect {
		http.Error(w, "CONNECT alone", http.StatusMethodNotAllowed)
		return
	}
	target, err := net.Dial("tcp", r.Host)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	defer target.Close()
	client, buffered, err := w.(http.Hijacker).Hijack()
	if err != nil {
		return
	}
	defer client.Close()
	// A test learns the way of its bytes from this line.
	log.Printf("customer's proxy: CONNECT %s", r.Host)
	fmt.Fprint(client, "HTTP/1.1 200 OK\r\n\r\n")
	go io.Copy(target, buffered)
	io.Copy(client, target)
}
