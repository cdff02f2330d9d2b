package main

import (
	"encoding/json"
	"io"
	"net/http"
)

// The API group of the aggregated API server.
const (
	group   = "tunnel.adit.invalid"
	version = "v1"
)

type object map[string]any

// extensions serves an aggregated API with one read-only resource, and a validating webhook that allows everything.
func extensions(address string) http.Handler {
	mux := http.NewServeMux()
	reply := func(path string, answer object) {
		mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) { send(w, answer) })
	}
	groupVersion := group + "/" + version
	preferred := object{"groupVersion": groupVersion, "version": version}
	apiGroup := object{"kind": "APIGroup", "apiVersion": "v1", "name": group, "versions": []object{preferred},
		"preferredVersion": preferred}
	reply("/apis", object{"kind": "APIGroupList", "apiVersion": "v1", "groups": []object{apiGroup}})
	reply("/apis/"+group, apiGroup)
	reply("/apis/"+groupVersion, object{"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": groupVersion,
		"resources": []object{{"name": "places", "singularName": "place", "namespaced": false, "kind": "Place",
			"verbs": []string{"get", "list"}}}})
	place := object{"kind": "Place", "apiVersion": groupVersion, "metadata": object{"name": address}}
	reply("/apis/"+groupVersion+"/places", object{"kind": "PlaceList", "apiVersion": groupVersion, "metadata": object{},
		"items": []object{place}})
	reply("/apis/"+groupVersion+"/places/"+address, place)
	mux.HandleFunc("/validate", validate)
	return mux
}

func validate(w http.ResponseWriter, r *http.Request) {
	var review struct {
		Request struct {
			UID string `json:"uid"`
		} `json:"request"`
	}
	body, err := io.ReadAll(r.Body)
	if err == nil {
		err = json.Unmarshal(body, &review)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	send(w, object{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1",
		"response": object{"uid": review.Request.UID, "allowed": true}})
}

func send(w http.ResponseWriter, answer object) {
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(answer)
}
