//! What a platform does after an image change: its operator updates the workload, and the program of the image starts.
//!
//! Neither kubelets nor controllers run with the API server of these tests. This module replaces both: it starts upstream's
//! program or ours with the platform's command line, and then reports a complete rollout.

use std::fs;
use std::net::Ipv4Addr;
use std::thread::sleep;
use std::time::Duration;

use serde_json::{Value, json};

use super::Follower;
use crate::cluster::{Cluster, MadeBy};
use crate::inside::put;
use crate::process::Process;
use crate::wait::{secs, until};

/// Name of our images on the pages.
const OURS: &str = "registry.example.org/adit";
/// Interval at which the operator checks for changes of the page.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(300);
/// Upstream's program names for the server's and the agent's end.
const PROGRAMS: [&str; 2] = ["proxy-server", "proxy-agent"];

/// A custom resource of the platform, and its single object.
pub(super) struct Custom {
    pub(super) kind: &'static str,
    pub(super) group: &'static str,
    pub(super) version: &'static str,
    pub(super) plural: &'static str,
    /// `None` if the resource is not namespaced.
    pub(super) namespace: Option<&'static str>,
    pub(super) name: &'static str,
    /// JSON text.
    pub(super) spec: &'static str,
}

/// The workload that runs the pods of one end.
pub(super) struct Workload {
    pub(super) kind: &'static str,
    pub(super) namespace: &'static str,
    pub(super) name: &'static str,
    /// Labels of the workload and its pods.
    pub(super) labels: &'static [(&'static str, &'static str)],
    pub(super) containers: &'static [&'static str],
    pub(super) writer: Writer,
}

/// What sets the image of a workload.
pub(super) enum Writer {
    /// The administrator only.
    Administrator,
    /// The operator, from the platform's object; `None` while it leaves the workload alone.
    Operator(fn(&Value) -> Option<String>),
    /// The operator, which applies a manifest after each change.
    Addon(&'static str),
}

/// The place in which one end of the platform runs.
pub(super) enum Place {
    Workload(Workload),
    /// A static pod, by the path of its manifest in the kubelet's folder.
    Manifest(&'static str),
}

/// One end of the platform: server or agent.
pub(super) struct End {
    /// Name of the end's container. Of other containers in its pod only the names matter.
    pub(super) container: &'static str,
    pub(super) place: Place,
}

/// The operator's state for one end.
#[derive(Default)]
pub(super) struct EndState {
    running: Option<(String, Process)>,
    /// The manifest as last applied.
    applied: String,
    /// The last generation that was reported as rolled out.
    reported: Option<u64>,
}

/// Upstream's image of an end, which runs at the beginning.
pub(super) fn upstream(end: usize) -> String {
    format!(
        "registry.k8s.io/kas-network-proxy/{}:v0.36.0",
        PROGRAMS[end]
    )
}

/// The origin of an image's program. If each end has its own image, the other end's image starts nothing.
fn made_by(end: usize, image: &str) -> MadeBy {
    let [server, agent] = ["adit-server:0.1.0", "adit-agent:0.1.0"];
    let other = [agent, server][end];
    if image.starts_with(OURS) && image.ends_with(":0.1.0") && !image.ends_with(other) {
        return MadeBy::Adit;
    }
    let own = format!("kas-network-proxy/{}:v0.36.0", PROGRAMS[end]);
    assert!(
        image.ends_with(&own),
        "no program of end {end} is in {image}"
    );
    MadeBy::Upstream
}

fn image_in(manifest: &str) -> Option<&str> {
    manifest
        .lines()
        .find_map(|line| line.trim().strip_prefix("image: "))
}

fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    let text = object.pointer(pointer).and_then(Value::as_str);
    text.unwrap_or_else(|| panic!("{object} has no text at {pointer}"))
}

impl Custom {
    fn reference(&self) -> Value {
        json!({
            "apiVersion": format!("{}/{}", self.group, self.version),
            "kind": self.kind,
            "metadata": {"name": self.name, "namespace": self.namespace.unwrap_or_default()},
        })
    }

    pub(super) fn create(&self, cluster: &Cluster) {
        let (kind, group, version, plural) = (self.kind, self.group, self.version, self.plural);
        let definition = json!({
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": format!("{plural}.{group}")},
            "spec": {
                "group": group,
                "names": {"kind": kind, "plural": plural, "singular": kind.to_lowercase()},
                "scope": if self.namespace.is_some() { "Namespaced" } else { "Cluster" },
                "versions": [{
                    "name": version,
                    "served": true,
                    "storage": true,
                    "schema": {"openAPIV3Schema": {
                        "type": "object",
                        "x-kubernetes-preserve-unknown-fields": true,
                    }},
                }],
            },
        });
        // Two pages of one platform define the same resource.
        create_unless_there(cluster, &definition);
        if let Some(namespace) = self.namespace {
            create_namespace(cluster, namespace);
        }
        let mut object = self.reference();
        object["spec"] = serde_json::from_str(self.spec).expect("JSON");
        until("a kind that is served", secs(20), || {
            let created = cluster.try_kubectl(&["create", "-f", "-"], Some(&object));
            created.ok()
        });
    }
}

/// Creates an object, which may exist already.
fn create_unless_there(cluster: &Cluster, object: &Value) {
    let made = cluster.try_kubectl(&["create", "-f", "-"], Some(object));
    if let Err(error) = made {
        assert!(error.contains("AlreadyExists"), "{error}");
    }
}

fn create_namespace(cluster: &Cluster, name: &str) {
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
    create_unless_there(cluster, &namespace);
}

impl Workload {
    fn reference(&self) -> Value {
        json!({
            "apiVersion": "apps/v1",
            "kind": self.kind,
            "metadata": {"name": self.name, "namespace": self.namespace},
        })
    }

    /// Pod template of the workload.
    fn template(&self, container: &str, image: &str) -> Value {
        let labels: serde_json::Map<String, Value> = self
            .labels
            .iter()
            .map(|(key, value)| ((*key).to_owned(), json!(value)))
            .collect();
        let containers: Vec<Value> = self
            .containers
            .iter()
            .map(|name| {
                let image = if *name == container { image } else { "none" };
                json!({"name": name, "image": image})
            })
            .collect();
        json!({"metadata": {"labels": labels}, "spec": {"containers": containers}})
    }

    pub(super) fn create(&self, cluster: &Cluster, container: &str, image: &str) {
        create_namespace(cluster, self.namespace);
        let mut workload = self.reference();
        let template = self.template(container, image);
        let labels = &template["metadata"]["labels"];
        workload["metadata"]["labels"] = labels.clone();
        if let Writer::Addon(path) = self.writer {
            // JSON is valid YAML. The image needs its own line.
            let manifest = format!(
                "apiVersion: apps/v1\nkind: {}\nmetadata: {}\nspec:\n  selector: {}\n  template:\n    metadata: {}\n    spec:\n      \
                 containers:\n      - name: {container}\n        image: {image}\n        \
                 resources: {{limits: {{memory: 30Mi}}}}\n",
                self.kind,
                workload["metadata"],
                json!({"matchLabels": labels}),
                template["metadata"],
            );
            put(path, manifest.as_bytes());
            cluster.kubectl(&["apply", "-f", path], None);
            return;
        }
        workload["spec"] = json!({"selector": {"matchLabels": labels}, "template": template});
        cluster.create(&workload);
    }

    /// Creates a pod of the workload on the first node, at this address.
    pub(super) fn create_pod(
        &self,
        cluster: &Cluster,
        container: &str,
        image: &str,
        address: Ipv4Addr,
    ) {
        let name = format!("{}-0", self.name);
        let mut pod = self.template(container, image);
        pod["apiVersion"] = json!("v1");
        pod["kind"] = json!("Pod");
        pod["metadata"]["name"] = json!(name);
        pod["metadata"]["namespace"] = json!(self.namespace);
        pod["spec"]["nodeName"] = json!("node-1");
        cluster.create(&pod);
        let ips = json!([{"ip": address}]);
        let status = json!({"phase": "Running", "podIP": address, "podIPs": ips});
        cluster.patch_status([self.namespace, "pod", &name], &status, &[]);
    }

    pub(super) fn delete(&self, cluster: &Cluster) {
        let words = ["delete", self.kind, self.name, "-n", self.namespace];
        cluster.kubectl(&[&words[..], &["--wait=false"]].concat(), None);
    }

    pub(super) fn delete_pod(&self, cluster: &Cluster) {
        cluster.delete_pod(self.namespace, &format!("{}-0", self.name));
    }

    /// Reports that the rollout of this generation is complete.
    pub(super) fn report(&self, cluster: &Cluster, generation: u64) {
        let status = match self.kind {
            "Deployment" => json!({
                "observedGeneration": generation,
                "replicas": 1,
                "updatedReplicas": 1,
                "readyReplicas": 1,
                "availableReplicas": 1,
            }),
            _ => json!({
                "observedGeneration": generation,
                "desiredNumberScheduled": 1,
                "currentNumberScheduled": 1,
                "updatedNumberScheduled": 1,
                "numberReady": 1,
                "numberAvailable": 1,
                "numberMisscheduled": 0,
            }),
        };
        let object = [self.namespace, self.kind, self.name];
        cluster.patch_status(object, &status, &["--type=merge"]);
    }
}

impl End {
    /// Creates the end as the platform has it, with pods at this address.
    pub(super) fn create(&self, cluster: &Cluster, end: usize, address: Ipv4Addr) {
        let (container, image) = (self.container, upstream(end));
        match &self.place {
            Place::Workload(workload) => {
                workload.create(cluster, container, &image);
                workload.create_pod(cluster, container, &image, address);
            }
            Place::Manifest(path) => {
                let manifest = format!(
                    "apiVersion: v1\nkind: Pod\nmetadata:\n  name: konnectivity-server\n  namespace: kube-system\nspec:\n  \
                     containers:\n  - name: {container}\n    image: {image}\n"
                );
                put(path, manifest.as_bytes());
            }
        }
    }
}

impl Follower<'_> {
    /// Acts as the platform while the page is followed.
    pub(super) fn operate(&self) {
        let mut ends: [EndState; 2] = Default::default();
        let references = json!({"apiVersion": "v1", "kind": "List", "items": self.references()});
        while !self.is_over() {
            let objects = self.objects(&references);
            for (end, state) in ends.iter_mut().enumerate() {
                self.care(end, &objects, state);
            }
            sleep(POLL_INTERVAL);
        }
    }

    /// References to the watched objects.
    fn references(&self) -> Vec<Value> {
        let workloads = self
            .ends()
            .into_iter()
            .flatten()
            .filter_map(|end| match &end.place {
                Place::Workload(workload) => Some(workload.reference()),
                Place::Manifest(_) => None,
            });
        let own = self.page.custom.as_ref().map(Custom::reference);
        workloads.chain(own).collect()
    }

    /// Current state of the watched objects.
    fn objects(&self, references: &Value) -> Vec<Value> {
        let cluster = self.installation.cluster;
        let got = cluster.kubectl(&["get", "-f", "-", "-o", "json"], Some(references));
        let mut got: Value = serde_json::from_str(&got).expect("JSON");
        match got.get_mut("items").map(Value::take) {
            Some(Value::Array(items)) => items,
            _ => vec![got],
        }
    }

    /// Brings one end to the state that its image demands.
    fn care(&self, number: usize, objects: &[Value], state: &mut EndState) {
        let cluster = self.installation.cluster;
        let find = |kind: &str, name: &str| {
            let found = objects.iter().find(|object| {
                text(object, "/kind") == kind && text(object, "/metadata/name") == name
            });
            found.unwrap_or_else(|| panic!("no {kind} {name}"))
        };
        // If the page has no such end, the platform keeps upstream's program.
        let Some(end) = self.ends()[number] else {
            return self.run(number, &upstream(number), state);
        };
        let workload = match &end.place {
            Place::Workload(workload) => workload,
            Place::Manifest(path) => {
                // The manifest may be missing while it is replaced.
                let manifest = fs::read_to_string(path).unwrap_or_default();
                if let Some(image) = image_in(&manifest) {
                    self.run(number, image, state);
                }
                return;
            }
        };
        let object = find(workload.kind, workload.name);
        let containers = object.pointer("/spec/template/spec/containers");
        let own = containers
            .and_then(Value::as_array)
            .and_then(|all| all.iter().find(|one| one["name"] == end.container))
            .unwrap_or_else(|| panic!("no container {} in {object}", end.container));
        let image = text(own, "/image");
        match workload.writer {
            Writer::Administrator => (),
            Writer::Operator(wanted) => {
                let own = self.page.custom.as_ref().expect("it has an object");
                if let Some(wanted) = wanted(find(own.kind, own.name))
                    && wanted != image
                {
                    let target = format!("{}/{}", workload.kind, workload.name);
                    let set = format!("{}={wanted}", end.container);
                    let words = ["set", "image", &target, &set, "-n", workload.namespace];
                    cluster.kubectl(&words, None);
                    return;
                }
            }
            Writer::Addon(path) => {
                let manifest = fs::read_to_string(path).unwrap_or_default();
                if image_in(&manifest).is_some() && manifest != state.applied {
                    cluster.kubectl(&["apply", "-f", path], None);
                    state.applied = manifest;
                    return;
                }
            }
        }
        self.run(number, image, state);
        let generation = object["metadata"]["generation"].as_u64();
        if state.reported != generation {
            workload.report(cluster, generation.expect("a number"));
            state.reported = generation;
        }
    }

    /// Starts the program of this image, unless it runs already.
    fn run(&self, end: usize, image: &str, state: &mut EndState) {
        let running = state.running.as_ref();
        if running.is_some_and(|(running, _)| running == image) {
            return;
        }
        if let Some((_, mut process)) = state.running.take() {
            process.kill();
        }
        let made_by = made_by(end, image);
        let process = match end {
            0 => self.installation.server(made_by),
            _ => self.installation.agent(made_by),
        };
        state.running = Some((image.to_owned(), process));
        self.set_runs(end, made_by);
    }
}
