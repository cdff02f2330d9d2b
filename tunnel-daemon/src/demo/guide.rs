//! Commands to try in a second terminal, and the files they use.

use super::screen::{COMMAND, FAINT, HEADING, Screen};
use super::world::World;
use crate::status::text::WIDTH;

/// Writes `egress.yaml` and `curl.conf`, and prints commands that use them.
///
/// # Errors
/// A file cannot be written.
pub(super) fn print(world: &World, screen: &Screen) -> anyhow::Result<()> {
    let file = |name: &str| world.folder.file(name);
    let egress = world
        .folder
        .write("egress.yaml", &egress(&file("grpc.sock"))?)?;
    let [.., tls] = &world.frontends;
    let options = [
        ("proxy", tls.place.clone()),
        ("proxy-cacert", file("ca.crt")),
        ("proxy-cert", file("client.crt")),
        ("proxy-key", file("client.key")),
    ];
    let conf = world.folder.write("curl.conf", &curl_conf(&options))?;
    let command = |about: &str, parts: &[&str]| {
        let about = screen.paint(FAINT, format_args!("# {about}"));
        screen.line(format_args!("  {about}"));
        for line in folded(parts).lines() {
            screen.line(format_args!("  {}", screen.paint(COMMAND, line)));
        }
    };
    let curl = format!("curl --config {}", shell(&conf));
    let [page, refused] = [world.web, world.closed].map(|target| format!("http://{target}/"));
    let bulk = format!("http://{}/bulk/1000000000", world.bulk);
    screen.line(screen.paint(HEADING, "Try in a second terminal"));
    command(
        "a page: curl -> server -> agent north -> target",
        &[&curl, &page],
    );
    command(
        "a GB, through agent south",
        &[&curl, "--output /dev/null", &bulk],
    );
    command(
        "nothing listens there: 502 instead of a tunnel",
        &[&curl, &refused],
    );
    if let Some(captured) = &world.captured {
        let script = format!("sh -c 'echo $$ > \"$0\" && exec curl {page}'");
        let processes = shell(&captured.processes().display().to_string());
        let about = "curl without any setting of a proxy, captured by the kernel";
        command(about, &[&script, &processes]);
    }
    if let Some(health) = world.server.health {
        let metrics = format!("curl --silent http://{health}/metrics | grep ^adit_");
        command("what the server counts", &[&metrics]);
    }
    let top = format!("adit top --admin-socket {}", shell(&file("admin.sock")));
    command(
        "its open tunnels, live; `adit status` shows the rest",
        &[&top],
    );
    let flag = format!("--egress-selector-config-file={}", shell(&egress));
    command(
        "a kube-apiserver on this machine",
        &["kube-apiserver", &flag],
    );
    Ok(())
}

/// A command on lines that fit the terminal, broken between its parts alone. A shell joins the lines again.
fn folded(parts: &[&str]) -> String {
    let (mut text, mut used) = (String::new(), 0);
    for part in parts {
        // Before the command are two blanks, and behind it may follow a blank and a backslash.
        if used > 0 && used + part.len() + 5 > WIDTH {
            text.push_str(" \\\n   ");
            used = 3;
        }
        let blank = if text.is_empty() { "" } else { " " };
        text.push_str(&format!("{blank}{part}"));
        used += blank.len() + part.len();
    }
    text
}

/// The file that kube-apiserver reads.
fn egress(socket: &str) -> anyhow::Result<String> {
    // A JSON string is valid YAML, whatever it contains.
    let socket = serde_json::to_string(socket)?;
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
        let written = egress("/run/adit/kas.sock").unwrap();
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
        let written = egress("/run/adit/kas.sock").unwrap();
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

    #[test]
    fn commands_are_broken_between_their_parts_alone() {
        let long = format!("curl {}", "x".repeat(60));
        let parts = [long.as_str(), "--output /dev/null"];
        let text = folded(&parts);
        assert!(text.lines().all(|line| line.len() <= WIDTH - 2), "{text}");
        assert_eq!(text, parts.join(" \\\n    "));
        assert_eq!(folded(&parts[1..]), parts[1]);
    }
}
