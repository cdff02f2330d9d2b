//! Pods of the chart's workloads, without controllers, scheduler and kubelet. The API server accepts each pod as its
//! workload's template describes it. Volumes have the API server's data. The container starts with its security context,
//! except for seccomp and SELinux.

use std::fs::{self, File, Permissions};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::inside::put;
use crate::namespace::Node;
use crate::process::Process;
use crate::server::ask_at;
use crate::wait::{secs, until};

/// Folder of volumes and container files.
const PODS: &str = "/mnt/pods";
/// The node of all pods.
const NODE: &str = "node-1";
/// Folder of the pod's account token in a container.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// Longest time until a container is ready, in seconds.
const READY: u64 = 60;

fn text<'a>(value: &'a Value, pointer: &str) -> &'a str {
    let text = value.pointer(pointer).and_then(Value::as_str);
    text.unwrap_or_else(|| panic!("{value} has no text at {pointer}"))
}

pub(crate) fn list<'a>(value: &'a Value, pointer: &str) -> &'a [Value] {
    let list = value.pointer(pointer).and_then(Value::as_array);
    list.map_or(&[], Vec::as_slice)
}

fn number(value: &Value, pointer: &str) -> Option<u32> {
    let number = value.pointer(pointer)?.as_u64()?;
    Some(u32::try_from(number).expect("a small number"))
}

/// A folder or file of this host that is mounted at a path of a container.
struct Mount {
    from: PathBuf,
    at: String,
    is_read_only: bool,
}

/// A pod with one container.
pub(crate) struct Pod<'a> {
    cluster: &'a Cluster,
    object: Value,
}

impl<'a> Pod<'a> {
    /// Creates a pod of the component's only workload.
    pub(crate) fn of_component(cluster: &'a Cluster, component: &str) -> Self {
        let label = format!("app.kubernetes.io/component={component}");
        let all = ["daemonsets,deployments", "-A", "-l", &label];
        let found = get(cluster, &all);
        let [workload] = list(&found, "/items") else {
            panic!("not one workload: {found}");
        };
        let mut object = workload["spec"]["template"].clone();
        object["apiVersion"] = json!("v1");
        object["kind"] = json!("Pod");
        object["metadata"]["namespace"] = workload["metadata"]["namespace"].clone();
        object["metadata"]["name"] = json!(format!("{}-0", text(workload, "/metadata/name")));
        object["spec"]["nodeName"] = json!(NODE);
        let pod = Self { cluster, object };
        let create = ["create", "--validate=strict", "-f", "-"];
        cluster.kubectl(&create, Some(&pod.object));
        let address = Cluster::node_address(0);
        let ips = json!([{"ip": address}]);
        let status = json!({
            "phase": "Running", "hostIP": address, "hostIPs": ips, "podIP": address, "podIPs": ips,
        });
        cluster.patch_status([pod.namespace(), "pod", pod.name()], &status, &[]);
        pod
    }

    fn name(&self) -> &str {
        text(&self.object, "/metadata/name")
    }

    fn namespace(&self) -> &str {
        text(&self.object, "/metadata/namespace")
    }

    fn container(&self) -> &Value {
        &self.object["spec"]["containers"][0]
    }

    /// A setting of the container's security context, with the pod's as the default.
    fn security(&self, name: &str) -> u32 {
        let pointer = format!("/securityContext/{name}");
        let own = number(self.container(), &pointer);
        let setting = own.or_else(|| number(&self.object["spec"], &pointer));
        setting.unwrap_or_else(|| panic!("no {name}"))
    }

    /// Starts its container, on a node or beside the API server.
    pub(crate) fn start(&self, node: Option<&Node>) -> Process {
        let root = PathBuf::from(format!("{PODS}/{}/root", self.name()));
        let mounts = self.mounts();
        let script = self.script(&root, &mounts);
        let user = self.security("runAsUser");
        let group = self.security("runAsGroup");
        let mut words: Vec<String> = ["--mount", "sh", "-euc", &script, "sh", "env", "-i"]
            .map(str::to_owned)
            .to_vec();
        let variables = self.variables();
        let pairs = variables.iter();
        words.extend(pairs.map(|(name, value)| format!("{name}={value}")));
        words.extend([
            "setpriv".to_owned(),
            format!("--reuid={user}"),
            format!("--regid={group}"),
            match number(&self.object, "/spec/securityContext/fsGroup") {
                Some(group) => format!("--groups={group}"),
                None => "--clear-groups".to_owned(),
            },
            "--inh-caps=-all".to_owned(),
            self.bounding_set(),
        ]);
        if self.container()["securityContext"]["allowPrivilegeEscalation"] == false {
            words.push("--no-new-privs".to_owned());
        }
        let given = ["/command", "/args"].map(|part| list(self.container(), part));
        for word in given.concat() {
            let word = word.as_str().expect("text").to_owned();
            let word = variables.iter().fold(word, |word, (name, value)| {
                word.replace(&format!("$({name})"), value)
            });
            assert!(!word.contains("$("), "{word} names no variable");
            words.push(word);
        }
        let dir = self.cluster.dir.path();
        let process = match node {
            Some(node) => node.run(self.name(), Path::new("unshare"), &words, dir),
            None => Process::service(self.name(), Path::new("unshare"), &words, dir),
        };
        // The kubelet's exec reads this file.
        let file = self.cluster.containers().join(self.name());
        fs::create_dir_all(self.cluster.containers()).expect("a folder");
        fs::write(file, process.id().to_string()).expect("a file");
        process
    }

    /// Waits until its readiness probe succeeds. The probe uses `address` unless it has its own host.
    pub(crate) fn until_ready(&self, address: Ipv4Addr) {
        let probe = &self.container()["readinessProbe"]["httpGet"];
        let host = match probe["host"].as_str() {
            Some(host) => host.parse().expect("an address"),
            None => address,
        };
        let ports = list(self.container(), "/ports");
        let port = ports.iter().find(|port| port["name"] == probe["port"]);
        let port = number(port.expect("a port of that name"), "/containerPort").expect("a number");
        let at = SocketAddr::from((host, u16::try_from(port).expect("a port")));
        until(&format!("{} is ready", self.name()), secs(READY), || {
            ask_at(at, text(probe, "/path")).ok()
        });
    }

    /// The argument `--bounding-set` of `setpriv`.
    fn bounding_set(&self) -> String {
        let mut set = "--bounding-set=-all".to_owned();
        let capabilities = &self.container()["securityContext"]["capabilities"];
        assert_eq!(capabilities["drop"], json!(["ALL"]));
        for name in list(capabilities, "/add") {
            let name = name.as_str().expect("text").to_lowercase();
            set.push_str(&format!(",+{name}"));
        }
        set
    }

    fn variables(&self) -> Vec<(String, String)> {
        let address = self.cluster.cables[0][0];
        let port = self.cluster.api_port.to_string();
        let mut variables = vec![
            ("KUBERNETES_SERVICE_HOST".to_owned(), address.to_string()),
            ("KUBERNETES_SERVICE_PORT".to_owned(), port),
            // Container runtimes set one; the image has the program in a folder of it.
            ("PATH".to_owned(), "/:/usr/sbin:/usr/bin".to_owned()),
        ];
        for variable in list(self.container(), "/env") {
            let field = variable.pointer("/valueFrom/fieldRef/fieldPath");
            let value = match field.and_then(Value::as_str) {
                None => text(variable, "/value").to_owned(),
                Some("metadata.name") => self.name().to_owned(),
                Some("spec.nodeName") => NODE.to_owned(),
                Some("status.hostIP") => Cluster::node_address(0).to_string(),
                Some(other) => panic!("the field {other}"),
            };
            variables.push((text(variable, "/name").to_owned(), value));
        }
        variables
    }

    /// Creates the container's root. Returns a script that mounts everything and then starts its arguments there.
    fn script(&self, root: &Path, mounts: &[Mount]) -> String {
        let at = |path: &str| root.join(path.trim_start_matches('/'));
        for folder in ["usr", "dev", "proc", "sys"] {
            fs::create_dir_all(at(folder)).expect("a folder");
        }
        // The test build of `adit` uses shared libraries of this host, and `setpriv` is the host's.
        for folder in ["bin", "lib", "lib64", "sbin"] {
            symlink(format!("usr/{folder}"), at(folder)).expect("a link");
        }
        for file in ["/etc/hosts", "/etc/resolv.conf"] {
            let path = at(file).display().to_string();
            put(&path, &fs::read(file).unwrap_or_default());
        }
        let root = root.display();
        let mut script = format!("mount --bind {root} {root}\n");
        for folder in ["usr", "dev", "proc", "sys"] {
            script.push_str(&format!("mount --rbind /{folder} {root}/{folder}\n"));
        }
        for mount in mounts {
            let target = at(&mount.at);
            if mount.from.is_dir() {
                fs::create_dir_all(&target).expect("a folder");
            } else {
                fs::create_dir_all(target.parent().expect("a folder")).expect("a folder");
                File::create(&target).expect("a file");
            }
            let [from, target] = [&mount.from, &target].map(|path| path.display());
            script.push_str(&format!("mount --bind {from} {target}\n"));
            if mount.is_read_only {
                script.push_str(&format!("mount -o remount,bind,ro {target}\n"));
            }
        }
        if self.container()["securityContext"]["readOnlyRootFilesystem"] == true {
            script.push_str(&format!("mount -o remount,bind,ro {root}\n"));
        }
        script.push_str(&format!("exec chroot {root} \"$@\"\n"));
        script
    }

    /// Mounts of the image and of the container's volumes.
    fn mounts(&self) -> Vec<Mount> {
        let mut mounts = vec![Mount {
            from: env!("CARGO_BIN_EXE_adit").into(),
            at: "/adit".to_owned(),
            is_read_only: true,
        }];
        let volumes = list(&self.object, "/spec/volumes");
        for mount in list(self.container(), "/volumeMounts") {
            let volume = volumes
                .iter()
                .find(|volume| volume["name"] == mount["name"]);
            let volume = volume.unwrap_or_else(|| panic!("{mount} has no volume"));
            mounts.push(Mount {
                from: self.volume(volume),
                at: text(mount, "/mountPath").to_owned(),
                is_read_only: mount["readOnly"] == true,
            });
        }
        if self.object["spec"]["automountServiceAccountToken"] == true {
            let authority = fs::read(self.cluster.files.ca_file()).expect("a file");
            let files = [
                ("token", self.token(&[]).into_bytes()),
                ("ca.crt", authority),
                ("namespace", self.namespace().into()),
            ];
            let folder = self.folder("account");
            for (name, content) in files {
                put(&folder.join(name).display().to_string(), &content);
            }
            mounts.push(Mount {
                from: folder,
                at: ACCOUNT.to_owned(),
                is_read_only: true,
            });
        }
        mounts
    }

    fn folder(&self, volume: &str) -> PathBuf {
        let folder = PathBuf::from(format!("{PODS}/{}/{volume}", self.name()));
        fs::create_dir_all(&folder).expect("a folder");
        folder
    }

    /// Path of a volume on this host.
    fn volume(&self, volume: &Value) -> PathBuf {
        if let Some(host) = volume.get("hostPath") {
            let path = PathBuf::from(text(host, "/path"));
            if host["type"] == "DirectoryOrCreate" {
                fs::create_dir_all(&path).expect("a folder");
            }
            let is_there = match text(host, "/type") {
                "File" => path.is_file(),
                _ => path.is_dir(),
            };
            assert!(is_there, "{host}");
            return path;
        }
        let folder = self.folder(text(volume, "/name"));
        if volume.get("emptyDir").is_some() {
            fs::set_permissions(&folder, Permissions::from_mode(0o777)).expect("it is ours");
        } else if let Some(secret) = volume.get("secret") {
            let object = self.object_of("secret", text(secret, "/secretName"));
            self.write(&folder, secret, &object["data"], |value| {
                BASE64.decode(value).expect("base64")
            });
        } else if let Some(map) = volume.get("configMap") {
            let object = self.object_of("configmap", text(map, "/name"));
            self.write(&folder, map, &object["data"], |value| value.into());
        } else if let Some(projected) = volume.get("projected") {
            for source in list(projected, "/sources") {
                let of_token = &source["serviceAccountToken"];
                let duration = number(of_token, "/expirationSeconds").expect("a time");
                let token = self.token(&[
                    &format!("--audience={}", text(of_token, "/audience")),
                    &format!("--duration={duration}s"),
                ]);
                let data = json!({(text(of_token, "/path")): token});
                self.write(&folder, projected, &data, |value| value.into());
            }
        } else {
            panic!("{volume}");
        }
        folder
    }

    fn object_of(&self, kind: &str, name: &str) -> Value {
        get(self.cluster, &[kind, name, "-n", self.namespace()])
    }

    /// A token of the pod's account, bound to the pod.
    fn token(&self, more: &[&str]) -> String {
        let bound = [
            "--bound-object-kind=Pod",
            &format!("--bound-object-name={}", self.name()),
        ];
        let account = text(&self.object, "/spec/serviceAccountName");
        let more = [&bound[..], more].concat();
        self.cluster.token(self.namespace(), account, &more)
    }

    /// Writes the data of a volume, or only its listed items, with the volume's mode and the pod's group.
    fn write(
        &self,
        folder: &Path,
        volume: &Value,
        data: &Value,
        content: impl Fn(&str) -> Vec<u8>,
    ) {
        let items = list(volume, "/items");
        let files: Vec<(&str, &str)> = if items.is_empty() {
            let keys = data.as_object().expect("data").keys();
            keys.map(|key| (&**key, &**key)).collect()
        } else {
            let pairs = items.iter();
            pairs
                .map(|item| (text(item, "/key"), text(item, "/path")))
                .collect()
        };
        let mode = number(volume, "/defaultMode").expect("the API server has a default");
        for (key, path) in files {
            let value = data[key].as_str();
            let value = value.unwrap_or_else(|| panic!("{volume}: there is no {key}"));
            let path = folder.join(path);
            fs::write(&path, content(value)).expect("a file");
            let group = number(&self.object, "/spec/securityContext/fsGroup");
            chown(&path, Some(0), group).expect("root gives it away");
            fs::set_permissions(&path, Permissions::from_mode(mode)).expect("it is ours");
        }
    }
}

/// Output of `kubectl get` as JSON.
pub(crate) fn get(cluster: &Cluster, what: &[&str]) -> Value {
    let object = cluster.kubectl(&[&["get", "-o", "json"], what].concat(), None);
    serde_json::from_str(&object).expect("JSON")
}
