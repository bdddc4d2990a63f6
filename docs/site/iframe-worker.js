// Browsers run no workers for pages opened as files, and the search is one: a hidden frame runs its script instead.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      this.ready = new Promise(resolve => {
        frame.onload = () => {
          frame.onload = null
          const inside = frame.contentWindow, script = frame.contentDocument.createElement("script")
          inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
          script.onload = () => resolve(inside)
          script.src = url
          frame.contentDocument.body.append(script)
        }
      })
      document.body.append(frame)
    }
    postMessage(data) {
      this.ready.then(inside => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }
  }
