//! The file of `--egress-selector-config-file`, decoded as kube-apiserver does: strictly, so that a misspelt field is an error.

use std::io::Read as _;
use std::path::Path;

use serde_json::{Map, Value};

use super::finding::{Effect, Finding};

/// Of a file that was given by mistake no more is read. Real ones have a few hundred bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

const KIND: &str = "EgressSelectorConfiguration";
const VERSION: &str = "apiserver.k8s.io/v1beta1";
const OLD_VERSION: &str = "apiserver.k8s.io/v1alpha1";

/// One element of `egressSelections`.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct Selection {
    /// Where it stands, for messages.
    pub(super) at: String,
    pub(super) name: String,
    pub(super) protocol: String,
    pub(super) transport: Option<Transport>,
}

/// `connection.transport`.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct Transport {
    pub(super) tcp: Option<Tcp>,
    /// `udsName`.
    pub(super) uds: Option<String>,
}

/// `connection.transport.tcp`.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct Tcp {
    pub(super) url: String,
    pub(super) tls: Option<TlsConfig>,
}

/// `connection.transport.tcp.tlsConfig`; what is absent is empty.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct TlsConfig {
    pub(super) ca_bundle: String,
    pub(super) client_key: String,
    pub(super) client_cert: String,
    pub(super) server_name: String,
}

/// What a file says, and its flaws so far.
#[derive(Default, Debug)]
pub(super) struct Decoded {
    /// Empty if kube-apiserver would not decode the file.
    pub(super) selections: Vec<Selection>,
    pub(super) findings: Vec<Finding>,
}

/// Reads and decodes the file at `path`.
pub(super) fn read(path: &Path) -> Decoded {
    let shown = path.display();
    let text = adit_host::files::open(path).and_then(|file| {
        let mut text = String::new();
        file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text)?;
        Ok(text)
    });
    let failed = |what: String, remedy: &str| Decoded {
        selections: Vec::new(),
        findings: vec![Finding::new(Effect::NoStart, what, remedy)],
    };
    match text {
        Ok(text) if text.len() as u64 > FILE_BYTES_MAX => failed(
            format!("{shown} has more than {FILE_BYTES_MAX} bytes"),
            "give the file of kube-apiserver's --egress-selector-config-file",
        ),
        Ok(text) => decode(&text),
        Err(error) => failed(
            format!("cannot read {shown}: {error}"),
            "give the file of kube-apiserver's --egress-selector-config-file, and let this user read it",
        ),
    }
}

/// Decodes YAML, of which JSON is a part.
pub(super) fn decode(text: &str) -> Decoded {
    let mut reader = Reader::default();
    // A path of the file is given on the command line, so its texts name fields alone.
    let selections = match serde_saphyr::from_multiple::<Value>(text) {
        Ok(documents) => reader.documents(documents),
        Err(error) => {
            let what = format!(
                "the file is no valid YAML or JSON: {}",
                error
                    .without_snippet()
                    .render_with_formatter(&serde_saphyr::UserMessageFormatter)
            );
            reader.refuse(what, "correct the line");
            Vec::new()
        }
    };
    let is_refused = reader.0.iter().any(|found| found.effect == Effect::NoStart);
    Decoded {
        selections: if is_refused { Vec::new() } else { selections },
        findings: reader.0,
    }
}

/// Decodes objects, and collects flaws.
#[derive(Default)]
struct Reader(Vec<Finding>);

impl Reader {
    fn refuse(&mut self, what: impl Into<String>, remedy: impl Into<String>) {
        self.0.push(Finding::new(Effect::NoStart, what, remedy));
    }

    fn documents(&mut self, documents: Vec<Value>) -> Vec<Selection> {
        let mut documents = documents.into_iter();
        let Some(Value::Object(map)) = documents.next() else {
            let remedy = format!("begin it with apiVersion: {VERSION} and kind: {KIND}");
            self.refuse("the file is empty, or holds no object", remedy);
            return Vec::new();
        };
        if documents.next().is_some() {
            self.0.push(Finding::new(
                Effect::Works,
                "the file has several documents, of which kube-apiserver reads the first",
                "write all selections into one list egressSelections",
            ));
        }
        self.type_of(&map);
        self.unknown_fields("", &map, &["apiVersion", "kind", "egressSelections"]);
        let list = match map.get("egressSelections") {
            None | Some(Value::Null) => &[],
            Some(Value::Array(list)) => list.as_slice(),
            Some(_) => {
                self.refuse(
                    "egressSelections is no list",
                    "begin each selection with - name:",
                );
                return Vec::new();
            }
        };
        let each = list.iter().enumerate();
        let selections = each.map(|(position, value)| self.selection(position, value));
        selections.collect()
    }

    /// Looks at apiVersion and kind.
    fn type_of(&mut self, map: &Map<String, Value>) {
        let (version, kind) = (self.text("", map, "apiVersion"), self.text("", map, "kind"));
        if kind != KIND {
            self.refuse(format!("kind is {kind:?}"), format!("write kind: {KIND}"));
        }
        match version.as_str() {
            VERSION => (),
            OLD_VERSION => self.0.push(Finding::new(
                Effect::Works,
                format!(
                    "apiVersion is {OLD_VERSION}, the older one, which kube-apiserver still takes"
                ),
                format!("write {VERSION}"),
            )),
            _ => self.refuse(
                format!("apiVersion is {version:?}"),
                format!("write apiVersion: {VERSION}"),
            ),
        }
    }

    fn selection(&mut self, position: usize, value: &Value) -> Selection {
        let at = format!("egressSelections[{position}]");
        // kube-apiserver takes an entry without content for one without a name.
        let map = self.object(&at, Some(value), &["name", "connection"]);
        let map = map.cloned().unwrap_or_default();
        let mut name = self.text(&at, &map, "name");
        if name == "master" {
            // As kube-apiserver's conversion does, in lower case only.
            "controlplane".clone_into(&mut name);
        }
        let fields = ["proxyProtocol", "transport"];
        let connection = self.object(&format!("{at}.connection"), map.get("connection"), &fields);
        let mut selection = Selection {
            at: match name.is_empty() {
                true => at.clone(),
                false => format!("{at} ({name})"),
            },
            name,
            ..Selection::default()
        };
        if let Some(connection) = connection {
            let at = format!("{at}.connection");
            selection.protocol = self.text(&at, connection, "proxyProtocol");
            selection.transport = self.transport(&at, connection.get("transport"));
        }
        selection
    }

    fn transport(&mut self, at: &str, value: Option<&Value>) -> Option<Transport> {
        let at = format!("{at}.transport");
        let map = self.object(&at, value, &["tcp", "uds"])?;
        let uds_at = format!("{at}.uds");
        let uds = self.object(&uds_at, map.get("uds"), &["udsName"]);
        Some(Transport {
            tcp: self.tcp(&at, map.get("tcp")),
            uds: uds.map(|uds| self.text(&uds_at, uds, "udsName")),
        })
    }

    fn tcp(&mut self, at: &str, value: Option<&Value>) -> Option<Tcp> {
        let at = format!("{at}.tcp");
        let map = self.object(&at, value, &["url", "tlsConfig"])?;
        let tls_at = format!("{at}.tlsConfig");
        let fields = ["caBundle", "clientKey", "clientCert", "tlsServerName"];
        let tls = self.object(&tls_at, map.get("tlsConfig"), &fields);
        Some(Tcp {
            url: self.text(&at, map, "url"),
            tls: tls.map(|tls| TlsConfig {
                ca_bundle: self.text(&tls_at, tls, "caBundle"),
                client_key: self.text(&tls_at, tls, "clientKey"),
                client_cert: self.text(&tls_at, tls, "clientCert"),
                server_name: self.text(&tls_at, tls, "tlsServerName"),
            }),
        })
    }

    /// The object at `at`, whose other fields than `known` are flaws; `None` if it is absent or null.
    fn object<'v>(
        &mut self,
        at: &str,
        value: Option<&'v Value>,
        known: &[&str],
    ) -> Option<&'v Map<String, Value>> {
        match value {
            None | Some(Value::Null) => None,
            Some(Value::Object(map)) => {
                self.unknown_fields(at, map, known);
                Some(map)
            }
            Some(_) => {
                let remedy = format!("write its fields below it: {}", known.join(", "));
                self.refuse(format!("{at} is no object"), remedy);
                None
            }
        }
    }

    /// The text of a field; empty if it is absent or null.
    fn text(&mut self, at: &str, map: &Map<String, Value>, field: &str) -> String {
        match map.get(field) {
            None | Some(Value::Null) => String::new(),
            Some(Value::String(text)) => text.clone(),
            Some(_) => {
                self.refuse(
                    format!("{} is no text", joined(at, field)),
                    "put its value in quotes",
                );
                String::new()
            }
        }
    }

    fn unknown_fields(&mut self, at: &str, map: &Map<String, Value>, known: &[&str]) {
        for field in map.keys().filter(|field| !known.contains(&field.as_str())) {
            let what = format!("the field {} is unknown", joined(at, field));
            self.refuse(what, spelling(field, known));
        }
    }
}

fn joined(at: &str, field: &str) -> String {
    match at {
        "" => field.to_owned(),
        at => format!("{at}.{field}"),
    }
}

/// The remedy of an unknown field.
fn spelling(field: &str, known: &[&str]) -> String {
    let same = known.iter().find(|known| known.eq_ignore_ascii_case(field));
    match (same, field) {
        (Some(known), _) => format!("write {known}: upper and lower case count"),
        (None, "type" | "httpConnect") => {
            // Kubernetes 1.16 and 1.17.
            "this is the spelling of Kubernetes 1.17: write proxyProtocol: HTTPConnect, and its URL and files below \
             transport.tcp"
                .to_owned()
        }
        (None, "tlsConfig") => {
            "remove it: TLS is for transport.tcp, and a unix socket has none".to_owned()
        }
        (None, "caBundle" | "clientKey" | "clientCert" | "tlsServerName") => {
            "move it below transport.tcp.tlsConfig".to_owned()
        }
        (None, _) => format!("remove it; the fields here are {}", known.join(", ")),
    }
}
