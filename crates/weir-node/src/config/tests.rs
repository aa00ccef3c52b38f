use super::*;
use crate::nbd_address::NbdAddress;

fn parse(text: &str) -> Result<Config, ConfigError> {
    Config::parse(text, Path::new("weir.toml"))
}

/// The example with every commented key switched on.
fn everything() -> String {
    let is_key = |line: &str| {
        line.split_once(" = ")
            .is_some_and(|(key, _)| key.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'))
    };
    EXAMPLE
        .lines()
        .map(|line| line.strip_prefix("# ").filter(|rest| is_key(rest)).unwrap_or(line))
        .collect::<Vec<_>>()
        .join("\n")
}

#[test]
fn the_example_shows_the_defaults() {
    let minimal = parse("name = \"n1\"").unwrap();
    assert_eq!(parse(EXAMPLE).unwrap(), minimal);
    let mut full = parse(&everything()).unwrap();
    assert_eq!(full.nbd_socket(), minimal.nbd_socket());
    assert_eq!(full.api_socket(), minimal.api_socket());
    (full.nbd.unix, full.api.socket, full.flash.path) = (None, None, None);
    assert_eq!(full.nbd.fence_grace(&full.lease), minimal.nbd.fence_grace(&minimal.lease));
    full.nbd.fence_grace = None;
    (full.identity.directory, full.api.listen) = (None, None);
    assert!(full.fuse.directory.is_some());
    full.fuse.directory = None;
    assert!(
        full.registry
            .etcd(&full.lease)
            .unwrap()
            .is_some_and(|etcd| etcd.tls.is_some() && etcd.user.is_some())
    );
    full.registry = RegistryConfig {
        etcd: Vec::new(),
        ca: None,
        certificate: None,
        key: None,
        user: None,
        password_file: None,
        ..full.registry
    };
    assert!(full.lun.fence_command.is_some() && !full.lun.devices.is_empty());
    (full.lun.fence_command, full.lun.devices) = (None, Vec::new());
    assert_eq!(full, minimal);
}

#[test]
fn the_example_has_every_key() {
    let mut config = parse("name = \"n1\"").unwrap();
    (config.nbd.unix, config.api.socket) = (Some("/a".into()), Some("/b".into()));
    (config.flash.path, config.identity.directory) = (Some("/c".into()), Some("/i".into()));
    config.api.listen = Some(([127, 0, 0, 1], 7443).into());
    let registry = &mut config.registry;
    (registry.ca, registry.certificate) = (Some("/d".into()), Some("/e".into()));
    (registry.key, registry.user) = (Some("/f".into()), Some("g".into()));
    registry.password_file = Some("/h".into());
    config.lun.fence_command = Some("/j".into());
    config.fuse.directory = Some("/k".into());
    config.nbd.fence_grace = Some(Period(Duration::from_secs(30)));
    let all = everything();
    let keys: Vec<_> = toml::to_string(&config)
        .unwrap()
        .lines()
        .filter_map(|line| Some(line.split_once(" = ")?.0.to_owned()))
        .collect();
    assert_eq!(keys.len(), 49, "a new key: extend this test's count and the example");
    for key in keys {
        assert!(
            all.lines().any(|line| line.starts_with(&format!("{key} = "))),
            "{key} is not in the example"
        );
    }
}

#[test]
fn incomplete_settings_for_etcd_are_named() {
    for (lines, words) in [
        ("ca = \"/ca\"", "registry.ca = /ca: it is for etcd; set registry.etcd, too"),
        ("user = \"weir\"", "registry.user = weir: it is for etcd"),
        ("etcd = [\"host:2379\"]", "registry.etcd = host:2379: it must be https://HOST:PORT"),
        ("etcd = [\"https://host:2379\"]", "registry.ca"),
        (
            "etcd = [\"https://host:2379\"]\nca = \"/ca\"\nkey = \"/k\"",
            "registry.key = /k: it needs registry.certificate",
        ),
        (
            "etcd = [\"https://host:2379\"]\ncertificate = \"/c\"\nkey = \"/k\"",
            "registry.certificate = /c: it needs registry.ca",
        ),
        (
            "etcd = [\"https://host:2379\"]\nca = \"/ca\"\nuser = \"u\"",
            "registry.user = u: it needs registry.password_file",
        ),
        (
            "etcd = [\"http://127.0.0.1:2379\"]\nprefix = \"weir\"",
            "registry.prefix = \"weir\": it must begin and end",
        ),
    ] {
        let error = parse(&format!("name = \"n1\"\n[registry]\n{lines}")).unwrap_err().to_string();
        assert!(error.contains(words), "{error:?} says nothing of {words:?}");
    }
    let config =
        parse("name = \"n1\"\n[registry]\netcd = [\"http://127.0.0.1:2379\"]\n[lease]\nttl = \"2 s\"")
            .unwrap();
    let etcd = config.registry.etcd(&config.lease).unwrap().unwrap();
    assert_eq!((&*etcd.prefix, etcd.attempt_timeout), ("/weir/default/", Duration::from_millis(400)));
    assert_eq!(config.registry.place(), "http://127.0.0.1:2379");
}

#[test]
fn other_hosts_are_spoken_to_in_plain_text_only_if_that_is_asked_for() {
    let with = |lines: &str| parse(&format!("name = \"n1\"\n{lines}")).map_err(|error| error.to_string());
    let everywhere = "[peers]\nlisten = \"0.0.0.0:7420\"\n";
    let error = with(everywhere).unwrap_err();
    assert!(
        error.contains("peers.listen = 0.0.0.0:7420") && error.contains("peers.plaintext = true"),
        "{error}"
    );
    assert!(with(&format!("{everywhere}plaintext = true")).is_ok());
    let identity = "[identity]\ndirectory = \"/var/lib/weir/identity\"\n";
    assert!(with(&format!("{everywhere}{identity}")).is_ok());
    let error = with(&format!("{everywhere}plaintext = true\n{identity}")).unwrap_err();
    assert!(error.contains("peers.plaintext = true: this node has an identity"), "{error}");
    let error = with("[identity]\ndirectory = \"keys\"").unwrap_err();
    assert!(error.contains("identity.directory = keys: it must be an absolute path"), "{error}");
}

#[test]
fn nbd_beyond_loopback_is_tls_unless_the_address_says_otherwise() {
    let with = |tcp: &str, more: &str| {
        let text = format!("name = \"n1\"\n[nbd]\ntcp = [{tcp}]\n{more}");
        parse(&text).map(|config| config.nbd.tcp).map_err(|error| error.to_string())
    };
    let identity = "[identity]\ndirectory = \"/i\"\n";
    let address = |text: &str, plaintext| NbdAddress { address: text.parse().unwrap(), plaintext };
    let (near, far) = ("127.0.0.1:10809", "10.0.0.1:10809");
    assert_eq!(with(&format!("\"{near}\""), ""), Ok(vec![address(near, true)]));
    assert_eq!(
        with(&format!("\"{far}\", \"[::1]:1\""), identity),
        Ok(vec![address(far, false), address("[::1]:1", true)])
    );
    let refused = with(&format!("\"{far}\""), "").unwrap_err();
    assert!(
        refused.contains("nbd.tcp = 10.0.0.1:10809: ") && refused.contains("set identity.directory"),
        "{refused}"
    );
    let allowed = "{ address = \"10.0.0.1:10809\", plaintext = true }";
    assert!(refused.contains(allowed), "{refused}");
    assert_eq!(with(allowed, ""), Ok(vec![address(far, true)]));
    assert_eq!(with(allowed, identity), Ok(vec![address(far, true)]));
    let secure = "{ address = \"127.0.0.1:10809\", plaintext = false }";
    assert_eq!(with(secure, identity), Ok(vec![address(near, false)]));
    assert!(with(secure, "").unwrap_err().contains("TLS is required there"));
    for all in ["\"0.0.0.0:10809\"", "{ address = \"[::]:10809\", plaintext = true }"] {
        let refused = with(all, identity).unwrap_err();
        assert!(refused.contains("write the one that they reach"), "{refused}");
    }
    for (bad, words) in [
        ("\"10.0.0.1\"", "ADDRESS:PORT"),
        ("{ address = \"10.0.0.1:1\", plain = true }", "unknown field `plain`"),
        ("{ plaintext = true }", "missing field `address`"),
        ("10809", "ADDRESS:PORT"),
    ] {
        let refused = with(bad, identity).unwrap_err();
        assert!(refused.contains(words) && refused.contains("line 3"), "{refused}");
    }
}

#[test]
fn errors_name_the_line_the_key_and_the_remedy() {
    let error = parse("name = \"n1\"\nshard = 2\n").unwrap_err().to_string();
    assert!(
        error.contains("line 2") && error.contains("shard") && error.contains("--print-config"),
        "{error}"
    );
    let error = parse("name = \"n1\"\n[lease]\nttl = \"5\"").unwrap_err().to_string();
    assert!(error.contains("line 3") && error.contains("5s for seconds"), "{error}");
    let error = parse("name = \"n1\"\n[lease]\nttl = \"1 ms\"").unwrap_err().to_string();
    assert!(error.contains("lease.ttl") && error.contains("500 ms to 5 min"), "{error}");
    let small = "name = \"n1\"\n[resources]\nlog = \"32 MiB\"";
    let error = parse(small).unwrap_err().to_string();
    assert!(error.contains("resources.log = 32MiB") && error.contains("64MiB to 64GiB"), "{error}");
    let none = "name = \"n1\"\n[resources]\nlog = \"256 MiB\"\nlogs = \"128 MiB\"";
    let error = parse(none).unwrap_err().to_string();
    assert!(error.contains("resources.logs") && error.contains("resources.log = 256MiB"), "{error}");
    let error = parse("name = \"n1\"\n[resources]\nbusy_poll_us = 2000").unwrap_err().to_string();
    assert!(error.contains("resources.busy_poll_us = 2000: it must be 0 to 1000"), "{error}");
    for (lines, words) in [
        ("mode = \"0700\"", "fuse.mode = 0700: it must be octal digits"),
        ("mode = \"rw\"", "fuse.mode = rw: "),
        ("directory = \"files\"", "fuse.directory = files: it must be an absolute path"),
        ("elsewhere = \"write\"", "expected `refuse` or `read`"),
    ] {
        let error = parse(&format!("name = \"n1\"\n[fuse]\n{lines}")).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    let error = parse("name = \"a b\"").unwrap_err().to_string();
    assert!(error.contains("letters"), "{error}");
    let error = Config::load(Path::new("/nonexistent/weir.toml")).unwrap_err().to_string();
    assert!(error.contains("/nonexistent/weir.toml") && error.contains("--print-config"), "{error}");
}

/// P4: whoever takes a disk over waits for `lease.fence_grace` alone.
#[test]
fn nbd_servers_have_no_longer_grace_than_former_owners() {
    let of = |lease: &str, nbd: &str| {
        let text = format!("name = \"n1\"\n[lease]\n{lease}\n[nbd]\n{nbd}");
        parse(&text).map(|config| config.nbd.fence_grace(&config.lease)).map_err(|error| error.to_string())
    };
    let seconds = Duration::from_secs;
    assert_eq!(of("", ""), Ok(seconds(30)));
    assert_eq!(of("fence_grace = \"20 s\"", ""), Ok(seconds(20)));
    assert_eq!(of("", "fence_grace = \"2 min\""), Ok(seconds(120)));
    let refused = of("", "fence_grace = \"121 s\"").unwrap_err();
    assert!(refused.contains("nbd.fence_grace = ") && refused.contains("lease.fence_grace = "), "{refused}");
}
