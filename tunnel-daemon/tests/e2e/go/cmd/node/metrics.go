package main

import (
	"fmt"
	"net"
	"net/http"
)

// metrics answers a scrape with the address it was reached at, so that the answer of another target is noticed.
func metrics(w http.ResponseWriter, r *http.Request) {
	host := ""
	if at, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr); ok {
		host = at.IP.String()
	}
	fmt.Fprintf(w, "reached{at=%q} 1\n", host)
}
