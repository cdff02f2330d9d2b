//! Errors of the libraries below, in words for operators. The caller names the file or the API server.

use std::error::Error;
use std::io;

use kube::config::{InClusterError, KubeconfigError, LoadDataError};

/// Why a kubeconfig cannot be used.
pub(crate) fn of_kubeconfig(error: &KubeconfigError) -> String {
    use KubeconfigError as E;
    match error {
        E::ReadConfig(error, _path) => of_io(error),
        // The parser's text may quote the file, which holds secrets.
        E::Parse(error) => match error.location() {
            Some(at) => format!("line {}: it is not YAML, or no kubeconfig", at.line()),
            None => "it is not YAML, or no kubeconfig".to_owned(),
        },
        E::CurrentContextNotSet => "it has no current-context".to_owned(),
        E::LoadContext(name) => {
            format!("it has no context {name}, which is its current-context")
        }
        E::LoadClusterOfContext(name) => {
            format!("it has no cluster {name}, which its current-context names")
        }
        E::MissingClusterUrl => "its cluster has no server".to_owned(),
        E::ParseClusterUrl(_) => "the server of its cluster is no URL".to_owned(),
        E::ParseProxyUrl(_) => "the proxy-url of its cluster is no URL".to_owned(),
        E::LoadCertificateAuthority(error) => of_data("certificate-authority", error),
        E::LoadClientCertificate(error) => of_data("client-certificate", error),
        E::LoadClientKey(error) => of_data("client-key", error),
        E::ParseCertificates(_) => "its certificate-authority is no PEM".to_owned(),
        other => other.to_string(),
    }
}

fn of_data(name: &str, error: &LoadDataError) -> String {
    match error {
        LoadDataError::DecodeBase64(_) => format!("{name}-data is not base64"),
        LoadDataError::ReadFile(error, path) => {
            format!("{name} {}: {}", path.display(), of_io(error))
        }
        LoadDataError::NoBase64DataOrFile => format!("it has no {name}"),
    }
}

/// Why the configuration of a pod cannot be used.
pub(crate) fn of_pod(error: &InClusterError) -> String {
    use InClusterError as E;
    match error {
        E::ReadEnvironmentVariable(_) => {
            "KUBERNETES_SERVICE_HOST or KUBERNETES_SERVICE_PORT is not set".to_owned()
        }
        E::ReadDefaultNamespace(error) => {
            format!("namespace of the service account: {}", of_io(error))
        }
        E::ReadCertificateBundle(error) => {
            format!("ca.crt of the service account: {}", of_io(error))
        }
        E::ParseCertificates(_) => "ca.crt of the service account is no PEM".to_owned(),
        E::ParseClusterPort(_) => "KUBERNETES_SERVICE_PORT is no port".to_owned(),
        E::ParseClusterUrl(_) => "KUBERNETES_SERVICE_HOST is no host".to_owned(),
    }
}

/// Why there is no connection: the innermost cause, which layers of libraries wrap.
pub(crate) fn of_connection(error: &(dyn Error + 'static)) -> String {
    let mut innermost = error;
    loop {
        // What an I/O error wraps is not its source.
        let wrapped = innermost.downcast_ref::<io::Error>();
        let wrapped = wrapped.and_then(io::Error::get_ref);
        let wrapped = wrapped.map(|inner| inner as &(dyn Error + 'static));
        match wrapped.or_else(|| innermost.source()) {
            Some(cause) => innermost = cause,
            None => break,
        }
    }
    match innermost.downcast_ref::<io::Error>() {
        Some(error) => of_io(error),
        None => innermost.to_string(),
    }
}

/// The system's text without its number.
pub(crate) fn of_io(error: &io::Error) -> String {
    let text = error.to_string();
    match error.raw_os_error() {
        Some(number) => {
            let number = format!(" (os error {number})");
            text.strip_suffix(&number).unwrap_or(&text).to_owned()
        }
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("client error (Connect)")]
    struct Layer(#[source] io::Error);

    #[test]
    fn the_innermost_cause_is_told_without_layers_and_numbers() {
        let refused = || io::Error::from_raw_os_error(111);
        assert_eq!(of_connection(&Layer(refused())), "Connection refused");
        let wrapped = io::Error::other(Layer(refused()));
        assert_eq!(of_connection(&Layer(wrapped)), "Connection refused");
        let text = io::Error::other("failed to look the name up");
        assert_eq!(of_connection(&Layer(text)), "failed to look the name up");
    }
}
