//! Commands to try in a second terminal, and the files they use.

use std::path::Path;

use anyhow::Context as _;

use super::screen::{Screen, Tone};
use super::world::{SERVER_ADMIN, World};

/// Writes `egress.yaml` and `curl.conf`, and prints commands that use them.
///
/// # Errors
/// A file cannot be written.
pub(super) fn print(world: &World, screen: &Screen) -> anyhow::Result<()> {
    let mut frontends = world.frontends.iter();
    let socket = frontends.find_map(|frontend| frontend.grpc_socket());
    let socket = socket.context("no gRPC frontend")?;
    let egress = world.folder.write("egress.yaml", &egress(socket)?)?;
    let mut frontends = world.frontends.iter();
    let proxy = frontends.find_map(|frontend| frontend.tls_address());
    let proxy = format!("https://{}", proxy.context("no TCP frontend")?);

    let file = |name: &str| world.folder.file(name).display().to_string();
    let options = [
        ("proxy", proxy),
        ("proxy-cacert", file("ca.crt")),
        ("proxy-cert", file("client.crt")),
        ("proxy-key", file("client.key")),
    ];
    let short = world.folder.write("curl.conf", &curl_conf(&options))?;
    let short = format!("curl --config {}", shell(&short.display().to_string()));
    let mut full = vec!["curl --proxytunnel".to_owned()];
    full.extend(
        options
            .iter()
            .map(|(name, value)| format!("    --{name} {}", shell(value))),
    );
    full.push(format!("    http://{}/", world.web));

    let heading = |text: &str| screen.line(screen.paint(Tone::Strong, text));
    let command = |about: &str, text: &str| {
        screen.line(format_args!(
            "  {}",
            screen.paint(Tone::Faint, format_args!("# {about}"))
        ));
        for line in text.lines() {
            screen.line(format_args!("  {}", screen.paint(Tone::Command, line)));
        }
    };
    heading("Try in a second terminal");
    command(
        "a page through the tunnel: curl -> mTLS frontend -> agent north -> web target",
        &full.join(" \\\n"),
    );
    command(
        "a GB, through agent south; the same options from a file",
        &format!(
            "{short} --output /dev/null http://{}/bulk/1000000000",
            world.bulk
        ),
    );
    command(
        "10 MB down one tunnel and up another; the target compares every byte",
        &format!(
            "{short} --silent http://{bulk}/bulk/10000000 \\\n    | {short} --data-binary @- http://{bulk}/upload",
            bulk = world.bulk
        ),
    );
    command(
        "nothing listens there: 502 instead of a tunnel",
        &format!("{short} http://{}/", world.closed),
    );
    if let Some(captured) = &world.captured {
        command(
            "a shell whose connections to the web target are captured, without any setting of a proxy",
            &format!(
                "sh -c 'echo $$ > \"$0\" && exec curl http://{}/' {}",
                world.web,
                shell(&captured.processes().display().to_string())
            ),
        );
    }
    if let Some(health) = world.server.health {
        command(
            "what the server counts",
            &format!("curl --silent http://{health}/metrics | grep -E '^(adit|konnectivity)_'"),
        );
    }
    command(
        "its open tunnels, live; `adit status` shows the rest",
        &format!("adit top --admin-socket {}", shell(&file(SERVER_ADMIN))),
    );
    heading("For a kube-apiserver on this machine");
    command(
        "EgressSelectorConfiguration with the gRPC socket",
        &format!(
            "kube-apiserver --egress-selector-config-file={} ...",
            shell(&egress.display().to_string())
        ),
    );
    Ok(())
}

/// The file that kube-apiserver reads.
fn egress(socket: &Path) -> anyhow::Result<String> {
    // A JSON string is valid YAML, whatever it contains.
    let socket = serde_json::to_string(&socket.to_string_lossy())?;
    Ok(format!(
        "apiVersion: apiserver.k8s.io/v1beta1\n\
         kind: EgressSelectorConfiguration\n\
         egressSelections:\n\
         - name: cluster\n\
         \x20 connection:\n\
         \x20   proxyProtocol: GRPC\n\
         \x20   transport:\n\
         \x20     uds:\n\
         \x20       udsName: {socket}\n"
    ))
}

fn curl_conf(options: &[(&str, String)]) -> String {
    let mut text = String::from("proxytunnel\n");
    for (name, value) in options {
        let value = value.replace('\\', "\\\\").replace('"', "\\\"");
        text.push_str(&format!("{name} = \"{value}\"\n"));
    }
    text
}

/// `text`, quoted for a shell if necessary.
fn shell(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-:=%+@,".contains(c);
    if text.chars().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// kube-apiserver decodes the file strictly: group, version and names must match its documentation.
    #[test]
    fn egress_file_is_what_kube_apiserver_reads() {
        let written = egress(Path::new("/run/adit/kas.sock")).unwrap();
        let expected = r#"apiVersion: apiserver.k8s.io/v1beta1
kind: EgressSelectorConfiguration
egressSelections:
- name: cluster
  connection:
    proxyProtocol: GRPC
    transport:
      uds:
        udsName: "/run/adit/kas.sock"
"#;
        assert_eq!(written, expected);
    }

    #[test]
    fn egress_file_of_the_readme_is_the_same() {
        let readme = include_str!("../../../README.md");
        let (_, from) = readme
            .split_once("```yaml\napiVersion: apiserver.k8s.io")
            .expect("the file is in the README");
        let (file, _) = from.split_once("```").expect("the block ends");
        // Lists may be indented; keys, values and their order must match.
        let lines = |text: &str| -> Vec<String> {
            let bare = text.lines().map(|line| line.trim().replace('"', ""));
            bare.collect()
        };
        let written = egress(Path::new("/run/adit/kas.sock")).unwrap();
        assert_eq!(
            lines(&format!("apiVersion: apiserver.k8s.io{file}")),
            lines(&written)
        );
    }

    #[test]
    fn shell_arguments_are_quoted_when_needed() {
        assert_eq!(shell("/tmp/adit-demo-x/ca.crt"), "/tmp/adit-demo-x/ca.crt");
        assert_eq!(shell("/tmp/it's here"), r"'/tmp/it'\''s here'");
    }

    #[test]
    fn curl_file_escapes_quotes_of_a_path() {
        let text = curl_conf(&[("proxy-cacert", "/a \"b\"/ca.crt".to_owned())]);
        assert_eq!(
            text,
            "proxytunnel\nproxy-cacert = \"/a \\\"b\\\"/ca.crt\"\n"
        );
    }
}
