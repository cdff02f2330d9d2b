//! Where the Kubernetes API is and how this process authenticates there; read again when the files change.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use crate::sha256::Sha256;
use adit_host::files::{ReadError, Reader, STUCK_AFTER, open, read_once};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use kube::config::{AuthInfo, KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use tokio::sync::Mutex;
use tokio::time::Instant;
use zeroize::Zeroizing;

use crate::no_proxy::is_excepted;
use crate::words::{self, of_io};

/// Shortest time between two checks whether the files changed.
const CHECK_EVERY: Duration = Duration::from_secs(1);
/// How often a configuration that keeps changing is read again.
const LOADS_MAX: usize = 5;
/// How long a request waits for changed files; after that it uses the configuration that was read last.
const PATIENCE: Duration = Duration::from_secs(1);
/// Longest file.
const FILE_BYTES_MAX: u64 = 16 << 20;
/// Where a pod has its service account.
const IN_CLUSTER: [&str; 2] = [
    "/var/run/secrets/kubernetes.io/serviceaccount/token",
    "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt",
];
/// Time to connect to the API server.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Where the configuration comes from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Source {
    /// A kubeconfig file.
    Kubeconfig(PathBuf),
    /// The environment and the service account of this pod.
    InCluster,
}

impl Source {
    /// The meaning of `--kubeconfig`: empty is in-cluster.
    #[must_use]
    pub fn of_flag(path: &str) -> Self {
        if path.is_empty() {
            Self::InCluster
        } else {
            Self::Kubeconfig(PathBuf::from(path))
        }
    }

    /// Its name in the log.
    fn name(&self) -> String {
        match self {
            Self::Kubeconfig(path) => format!("kubeconfig {}", path.display()),
            Self::InCluster => "the service account of this pod".to_owned(),
        }
    }
}

/// Why a configuration cannot be used.
#[derive(Clone, Debug, thiserror::Error)]
pub enum AccessError {
    /// A kubeconfig file.
    #[error("kubeconfig {path}: {why}", path = .path.display())]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// What is wrong with it or with a file that it names.
        why: String,
    },
    /// No kubeconfig is given, and this is no pod. Upstream's words.
    #[error(
        "invalid configuration: no configuration has been provided, try setting KUBERNETES_MASTER environment variable \
         ({0}; give --kubeconfig outside of a pod)"
    )]
    InCluster(String),
    /// No client can be made of the configuration.
    #[error("{0}")]
    Client(String),
}

/// The API server of one cluster.
#[derive(Debug)]
pub struct Api {
    source: Source,
    state: Mutex<State>,
    generation: AtomicU64,
    /// The URL of the API server, as last read, without a password.
    address: std::sync::Mutex<String>,
}

struct State {
    current: Option<Current>,
    checked: Instant,
    /// Content that could not be used, so that it is reported once.
    refused: Option<[u8; 32]>,
    reader: Reader<Looked>,
}

/// A new configuration, or why it cannot be used. `None`: the files have not changed.
type Looked = Option<Result<Current, Unusable>>;

struct Unusable {
    error: AccessError,
    /// Of the content, if it could be read.
    fingerprint: Option<[u8; 32]>,
}

#[derive(Clone)]
struct Current {
    client: Client,
    address: String,
    files: Vec<PathBuf>,
    fingerprint: [u8; 32],
    risk: Option<&'static str>,
    certificate: Option<Vec<u8>>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("State")
    }
}

/// A configuration with the files it was read from.
struct Loaded {
    config: Config,
    files: Vec<PathBuf>,
    fingerprint: [u8; 32],
    /// The client's certificates, PEM.
    certificate: Option<Vec<u8>>,
}

impl Api {
    /// Reads and checks the configuration. The API server is not contacted: it may start later than its own proxy.
    ///
    /// # Errors
    /// A file is missing or wrong; the text names it.
    pub async fn open(source: Source) -> Result<Arc<Self>, AccessError> {
        let (name, from) = (source.name(), source.clone());
        let opening = read_once(&name, move || {
            let loaded = load(&from)?;
            let address = address(&loaded.config);
            // A credential plugin runs when a client is made. Upstream runs it with the first request, so its failure must
            // not prevent a start.
            if loaded.config.auth_info.exec.is_some() {
                Ok((address, None))
            } else {
                connect(loaded).map(|current| (address, Some(current)))
            }
        });
        let (address, current) = opening.await.map_err(cut_off)??;
        let api = Self {
            source,
            state: Mutex::new(State {
                current,
                checked: Instant::now(),
                refused: None,
                reader: Reader::new(name),
            }),
            generation: AtomicU64::new(0),
            address: std::sync::Mutex::new(address),
        };
        Ok(Arc::new(api))
    }

    /// The URL of the API server, for logs.
    #[must_use]
    pub fn address(&self) -> String {
        let address = self.address.lock().unwrap_or_else(PoisonError::into_inner);
        address.clone()
    }

    /// Increases whenever a new configuration is taken into use.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation.load(Relaxed)
    }

    /// Why an attacker between this process and the API server could answer in its place. `None` before a client is made.
    pub async fn risk(&self) -> Option<&'static str> {
        self.state.lock().await.current.as_ref()?.risk
    }

    /// The client certificate in use (PEM), and the kubeconfig that contains or names it. Changed files are taken into use before.
    /// Certificates of credential plugins are not known here.
    pub async fn client_certificate(&self) -> Option<(&Path, Vec<u8>)> {
        let Source::Kubeconfig(path) = &self.source else {
            return None;
        };
        // The first client is left to the first request: making it runs a credential plugin.
        self.state.lock().await.current.as_ref()?;
        self.client().await.ok()?;
        let state = self.state.lock().await;
        let certificate = state.current.as_ref()?.certificate.clone()?;
        Some((path, certificate))
    }

    /// A client for the configuration as it is on disk now. Where new files cannot be used, or cannot be read within a second,
    /// the last configuration stays in use, and the log says so once.
    ///
    /// # Errors
    /// No configuration is usable.
    pub async fn client(&self) -> Result<Client, AccessError> {
        let mut state = self.state.lock().await;
        let state = &mut *state;
        let looked = loop {
            let (known, patience) = match &state.current {
                Some(current) if state.checked.elapsed() < CHECK_EVERY => {
                    return Ok(current.client.clone());
                }
                // It was waited for before.
                Some(_current) if state.reader.is_pending() => (None, Duration::ZERO),
                Some(current) => {
                    let known = (current.files.clone(), current.fingerprint);
                    (Some(known), PATIENCE)
                }
                None => (None, STUCK_AFTER),
            };
            let source = self.source.clone();
            let look = move || look(&source, known);
            let read = state.reader.read(patience, look).await;
            state.checked = Instant::now();
            match (read, &state.current) {
                (Ok(looked), _) => break looked,
                (Err(_pending), Some(current)) => return Ok(current.client.clone()),
                // The caller has a deadline. The next call gets the result.
                (Err(ReadError::Pending { .. }), None) => (),
                (Err(ReadError::Lost), None) => return Err(cut_off(ReadError::Lost)),
            }
        };
        let (connected, fingerprint) = match (looked, &state.current) {
            (None, Some(current)) => return Ok(current.client.clone()),
            (None, None) => return Err(cut_off(ReadError::Lost)),
            (Some(Ok(current)), _) => (Ok(current), None),
            (Some(Err(unusable)), _) => (Err(unusable.error), unusable.fingerprint),
        };
        match (connected, &state.current) {
            (Ok(current), _) => {
                let client = current.client.clone();
                current
                    .address
                    .clone_into(&mut self.address.lock().unwrap_or_else(PoisonError::into_inner));
                if state.current.replace(current).is_some() {
                    self.generation.fetch_add(1, Relaxed);
                    tracing::info!("the new configuration of the Kubernetes API is in use");
                }
                state.refused = None;
                Ok(client)
            }
            (Err(error), Some(current)) => {
                let client = current.client.clone();
                let content = fingerprint.unwrap_or_default();
                if state.refused.replace(content) != Some(content) {
                    tracing::error!(
                        %error,
                        "the new configuration of the Kubernetes API cannot be used; the last one stays in use"
                    );
                }
                Ok(client)
            }
            (Err(error), None) => Err(error),
        }
    }
}

fn cut_off(_lost: ReadError) -> AccessError {
    AccessError::Client("reading the configuration was cut off".to_owned())
}

/// Loads the configuration, unless its files are `known` with these contents. Blocks.
fn look(source: &Source, known: Option<(Vec<PathBuf>, [u8; 32])>) -> Looked {
    if let Some((files, before)) = known
        && fingerprint(&files).is_ok_and(|now| now == before)
    {
        return None;
    }
    let unusable = |error, fingerprint| Some(Err(Unusable { error, fingerprint }));
    match load(source) {
        Ok(loaded) => {
            let fingerprint = loaded.fingerprint;
            match connect(loaded) {
                Ok(current) => Some(Ok(current)),
                Err(error) => unusable(error, Some(fingerprint)),
            }
        }
        Err(error) => unusable(error, None),
    }
}

/// Loads until nothing changes between reading the configuration and reading its files. Blocks.
fn load(source: &Source) -> Result<Loaded, AccessError> {
    let mut loaded = load_once(source)?;
    for _try in 0..LOADS_MAX {
        let again = load_once(source)?;
        let is_settled = again.fingerprint == loaded.fingerprint;
        loaded = again;
        if is_settled {
            break;
        }
    }
    Ok(loaded)
}

/// The library opens files itself, so that each is opened here before: one that blocks, or is no file, is refused.
fn load_once(source: &Source) -> Result<Loaded, AccessError> {
    match source {
        Source::Kubeconfig(path) => {
            let wrong = |why: String| AccessError::Kubeconfig {
                path: path.clone(),
                why,
            };
            open(path).map_err(|error| wrong(of_io(&error)))?;
            let kubeconfig =
                Kubeconfig::read_from(path).map_err(|error| wrong(words::of_kubeconfig(&error)))?;
            let user = user_of(&kubeconfig).cloned().unwrap_or_default();
            let named = named_files(&kubeconfig, &user);
            for file in &named {
                open(file)
                    .map_err(|error| wrong(format!("{}: {}", file.display(), of_io(&error))))?;
            }
            let handle = tokio::runtime::Handle::current();
            let mut config = handle
                .block_on(Config::from_custom_kubeconfig(
                    kubeconfig.clone(),
                    &KubeConfigOptions::default(),
                ))
                .map_err(|error| wrong(words::of_kubeconfig(&error)))?;
            if proxy_of(&kubeconfig).is_none() && is_direct(&config) {
                config.proxy_url = None;
            }
            let mut files = vec![path.clone()];
            files.extend(named_files(&kubeconfig, &config.auth_info));
            finish(config, files).map_err(wrong)
        }
        Source::InCluster => {
            for file in IN_CLUSTER.map(Path::new) {
                match open(file) {
                    // The library says what is missing.
                    Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                        let why = format!("{}: {}", file.display(), of_io(&error));
                        return Err(AccessError::InCluster(why));
                    }
                    _ => (),
                }
            }
            let config = Config::incluster()
                .map_err(|error| AccessError::InCluster(words::of_pod(&error)))?;
            let files = config
                .root_cert_file
                .iter()
                .cloned()
                .chain(config.auth_info.token_file.as_ref().map(PathBuf::from))
                .collect();
            finish(config, files).map_err(AccessError::InCluster)
        }
    }
}

fn context_of(kubeconfig: &Kubeconfig) -> Option<&kube::config::Context> {
    let current = kubeconfig.current_context.as_ref();
    let mut contexts = kubeconfig.contexts.iter();
    let named = contexts.find(|named| Some(&named.name) == current)?;
    named.context.as_ref()
}

/// The user of the current context.
fn user_of(kubeconfig: &Kubeconfig) -> Option<&AuthInfo> {
    let user = context_of(kubeconfig)?.user.as_ref();
    let mut users = kubeconfig.auth_infos.iter();
    users
        .find(|named| Some(&named.name) == user)?
        .auth_info
        .as_ref()
}

fn cluster_of(kubeconfig: &Kubeconfig) -> Option<&kube::config::Cluster> {
    let cluster = &context_of(kubeconfig)?.cluster;
    let mut clusters = kubeconfig.clusters.iter();
    clusters
        .find(|named| named.name == *cluster)?
        .cluster
        .as_ref()
}

/// The proxy that the kubeconfig itself names.
fn proxy_of(kubeconfig: &Kubeconfig) -> Option<&String> {
    let proxy = cluster_of(kubeconfig)?.proxy_url.as_ref()?;
    Some(proxy).filter(|proxy| !proxy.is_empty())
}

/// Whether the environment excepts the API server from its proxy: the crate compares `NO_PROXY` with the proxy's own host.
fn is_direct(config: &Config) -> bool {
    let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    let list = variable("NO_PROXY")
        .or_else(|| variable("no_proxy"))
        .unwrap_or_default();
    let port = config.cluster_url.port_u16().unwrap_or(443);
    let host = config.cluster_url.host().unwrap_or_default();
    is_excepted(host.trim_matches(['[', ']']), port, &list)
}

/// Files that the configuration names.
fn named_files(kubeconfig: &Kubeconfig, user: &AuthInfo) -> Vec<PathBuf> {
    let ca = cluster_of(kubeconfig).and_then(|cluster| cluster.certificate_authority.clone());
    [
        ca,
        user.client_certificate.clone(),
        user.client_key.clone(),
        user.token_file.clone(),
    ]
    .into_iter()
    .flatten()
    .map(PathBuf::from)
    .collect()
}

/// # Errors
/// A file cannot be read.
fn finish(mut config: Config, files: Vec<PathBuf>) -> Result<Loaded, String> {
    let fingerprint = fingerprint(&files)
        .map_err(|(path, error)| format!("{}: {}", path.display(), of_io(&error)))?;
    if config.auth_info.token.is_none()
        && let Some(file) = config.auth_info.token_file.take()
    {
        let read = read(Path::new(&file));
        let read = read.map_err(|error| format!("token {file}: {}", of_io(&error)))?;
        let token = std::str::from_utf8(&read);
        let token = token.map_err(|_bytes| format!("token {file}: it is not text"))?;
        if token.trim().is_empty() {
            return Err(format!("token {file}: the file is empty"));
        }
        // As client-go does: most token files end with a line end.
        config.auth_info.token = Some(token.trim().to_owned().into());
    }
    let certificate = certificate(&config.auth_info)?;
    // This module checks the files for changes, the CA among them.
    config.root_cert_file = None;
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    // Each request has a time limit and a caller that retries.
    config.default_retry = false;
    Ok(Loaded {
        config,
        files,
        fingerprint,
        certificate,
    })
}

/// The client certificate of a user, from the place that takes precedence.
///
/// # Errors
/// Its file cannot be read, or its data is not base64.
fn certificate(user: &AuthInfo) -> Result<Option<Vec<u8>>, String> {
    if let Some(data) = &user.client_certificate_data {
        let decoded = STANDARD
            .decode(data)
            .map_err(|error| format!("client-certificate-data: {error}"))?;
        return Ok(Some(certificates(&Zeroizing::new(decoded))));
    }
    let Some(file) = &user.client_certificate else {
        return Ok(None);
    };
    let read = read(Path::new(file)).map_err(|error| format!("{file}: {}", of_io(&error)))?;
    Ok(Some(certificates(&read)))
}

/// The content of a regular file. Blocks while its file system does not answer.
fn read(path: &Path) -> std::io::Result<Zeroizing<Vec<u8>>> {
    use std::io::Read as _;
    let mut content = Zeroizing::new(Vec::new());
    open(path)?.take(FILE_BYTES_MAX).read_to_end(&mut content)?;
    Ok(content)
}

/// The certificates of PEM text. A file with the certificate often holds the private key, too, which must not be kept here.
fn certificates(pem: &[u8]) -> Vec<u8> {
    let (mut kept, mut is_inside) = (Vec::new(), false);
    for line in pem.split_inclusive(|byte| *byte == b'\n') {
        let text = line.trim_ascii();
        is_inside |= text == b"-----BEGIN CERTIFICATE-----";
        if is_inside {
            kept.extend_from_slice(line);
        }
        is_inside &= text != b"-----END CERTIFICATE-----";
    }
    kept
}

/// The API server's URL without user and path.
fn address(config: &Config) -> String {
    let url = &config.cluster_url;
    let scheme = url.scheme_str().unwrap_or("https");
    let host = url.host().unwrap_or_default();
    match url.port_u16() {
        Some(port) => format!("{scheme}://{host}:{port}"),
        None => format!("{scheme}://{host}"),
    }
}

/// Why an attacker between this process and the API server could answer in its place.
fn risk(config: &Config) -> Option<&'static str> {
    if config.cluster_url.scheme_str() == Some("http") {
        Some("the URL of the API server is http://: a host on the network path can forge answers")
    } else if config.accept_invalid_certs {
        Some(
            "the kubeconfig sets insecure-skip-tls-verify: a host on the network path can forge answers",
        )
    } else {
        None
    }
}

/// Blocks: a credential plugin is a process.
fn connect(loaded: Loaded) -> Result<Current, AccessError> {
    let risk = risk(&loaded.config);
    if let Some(risk) = risk {
        tracing::warn!("the Kubernetes API cannot be trusted: {risk}");
    }
    let address = address(&loaded.config);
    let client =
        Client::try_from(loaded.config).map_err(|error| AccessError::Client(chain(&error)))?;
    Ok(Current {
        client,
        address,
        files: loaded.files,
        fingerprint: loaded.fingerprint,
        risk,
        certificate: loaded.certificate,
    })
}

fn fingerprint(files: &[PathBuf]) -> Result<[u8; 32], (&Path, std::io::Error)> {
    let mut hash = Sha256::default();
    for path in files {
        let content = read(path).map_err(|error| (path.as_path(), error))?;
        hash.update(Sha256::digest(content.as_slice()));
    }
    Ok(hash.finish())
}

/// An error with its causes, without repetitions.
pub(crate) fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let words = next.to_string();
        if !text.contains(&words) {
            text.push_str(": ");
            text.push_str(&words);
        }
        cause = next.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kubeconfig(user: &str) -> String {
        format!(
            r#"{{"current-context":"a","contexts":[{{"name":"a","context":{{"cluster":"a","user":"u"}}}}],
            "clusters":[{{"name":"a","cluster":{{"server":"https://127.0.0.1:1"}}}}],
            "users":[{{"name":"u","user":{user}}}]}}"#
        )
    }

    /// The files and directories that a kubeconfig names, each broken in its turn.
    #[tokio::test]
    async fn errors_name_the_file_and_have_no_words_of_a_library() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        std::fs::write(at("empty"), " \n").unwrap();
        let with_token = |name: &str| kubeconfig(&format!(r#"{{"tokenFile":"{}"}}"#, at(name)));
        let (empty, none) = (with_token("empty"), with_token("none"));
        let of_empty = format!("token {}: the file is empty", at("empty"));
        let [path, path_of_none] = ["kubeconfig", "none"].map(at);
        let (file, no_file) = (path.as_str(), "No such file or directory");
        for (content, parts) in [
            (None, vec![file, no_file]),
            (Some("secret: ["), vec![file, "it is not YAML"]),
            (Some("{}"), vec![file, "it has no current-context"]),
            (Some(&*empty), vec![file, of_empty.as_str()]),
            (Some(&*none), vec![file, path_of_none.as_str(), no_file]),
        ] {
            match content {
                None => assert!(!Path::new(file).exists()),
                Some(content) => std::fs::write(file, content).unwrap(),
            }
            let error = Api::open(Source::Kubeconfig(file.into())).await;
            let text = error.unwrap_err().to_string();
            for part in parts {
                assert!(text.contains(part), "{part}: {text}");
            }
            for foreign in ["failed to", "os error", "secret", "\"", "Error"] {
                assert!(!text.contains(foreign), "{foreign}: {text}");
            }
        }
    }

    /// Makes a pipe, which would block a process that opens it.
    fn pipe(path: &Path) {
        let made = std::process::Command::new("mkfifo").arg(path).status();
        assert!(made.unwrap().success());
    }

    #[tokio::test(start_paused = true)]
    async fn a_pipe_is_refused_at_first_and_later_leaves_the_last_configuration_in_use() {
        let folder = tempfile::tempdir().unwrap();
        let [file, token, other] =
            ["config", "token", "other"].map(|name| folder.path().join(name));
        let open = || Api::open(Source::Kubeconfig(file.clone()));
        pipe(&token);
        std::fs::write(&file, kubeconfig(r#"{"tokenFile":"token"}"#)).unwrap();
        let error = open().await.unwrap_err().to_string();
        assert!(error.contains("token: it is a named pipe"), "{error}");

        std::fs::write(&file, kubeconfig(r#"{"token":"t"}"#)).unwrap();
        let api = open().await.unwrap();
        pipe(&other);
        std::fs::rename(&other, &file).unwrap();
        tokio::time::advance(2 * CHECK_EVERY).await;
        assert!(api.client().await.is_ok());
        assert_eq!(api.generation(), 0);
        let error = open().await.unwrap_err().to_string();
        assert!(error.contains("config: it is a named pipe"), "{error}");
    }

    #[test]
    fn a_private_key_beside_a_certificate_is_not_kept() {
        let block = |kind: &str| format!("-----BEGIN {kind}-----\nQQ==\n-----END {kind}-----\n");
        let (certificate, key) = (block("CERTIFICATE"), block("PRIVATE KEY"));
        let text = format!("{certificate}{key}{certificate}");
        let kept = certificates(text.as_bytes());
        assert_eq!(kept, certificate.repeat(2).as_bytes());
    }
}
