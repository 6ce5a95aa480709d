// A page that is opened as a file may start no worker. There, a worker is a hidden frame that runs the same script,
// so that the search works without a server.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      const script = inside.document.createElement("script");
      this.ready = new Promise((resolve) => { script.onload = resolve; });
      script.src = new URL(url, location.href).href;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.document.body.append(script);
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
